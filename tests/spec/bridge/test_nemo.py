"""Megatron-Bridge recipes: YAML overrides, saved configurations, Hydra words, Python lines."""

from typing import Any

import pytest
import yaml

from meshwright.errors import InputError
from meshwright.spec.bridge.nemo import export, import_
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model import decoder

RECIPE = '''
def llama3_70b_pretrain_config():
    """Return a pre-training config."""
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-70B").get_model_config()
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.virtual_pipeline_model_parallel_size = 5
    cfg.model.context_parallel_size = 2
    cfg.model.sequence_parallel = True
    cfg.train.global_batch_size = 512
    cfg.train.micro_batch_size = 1  # per data-parallel rank
    cfg.dataset.seq_length = 8192
    cfg.optimizer.exp_avg_dtype = torch.bfloat16
    cfg.optimizer.exp_avg_sq_dtype = torch.bfloat16
    cfg.mixed_precision = bf16_mixed()
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)
    return cfg
'''


def test_the_text_is_yaml_in_the_recipe_s_sections() -> None:
    data = yaml.safe_load(export(Layout(tp=2, dp=4, zero=1, global_batch=8)).text)
    assert data["model"]["tensor_model_parallel_size"] == 2
    assert data["train"] == {"micro_batch_size": 1, "global_batch_size": 8}
    assert data["ddp"]["use_distributed_optimizer"] is True
    assert data["mixed_precision"] == "bf16_mixed"


def test_what_is_off_is_written_too_because_a_recipe_may_have_it_on() -> None:
    data = yaml.safe_load(export(Layout()).text)
    assert data["model"]["recompute_granularity"] is None
    assert data["ddp"]["use_distributed_optimizer"] is False
    assert data["optimizer"]["use_distributed_optimizer"] is False
    assert data["comm_overlap"] is None


def test_the_lines_of_a_recipe_function_are_read_and_not_run() -> None:
    imported = import_(RECIPE, gpus=64)
    assert imported.layout == Layout(
        tp=4, pp=4, virtual_stages=5, schedule="interleaved", cp=2, dp=2, sequence_parallel=True,
        zero=1, global_batch=512, overlap_tp=True, moment_precision="bf16",
    )  # fmt: skip
    assert imported.sequence_length == 8192


def test_hydra_words_are_read() -> None:
    text = (
        "model.tensor_model_parallel_size=4 ++train.micro_batch_size=2 mixed_precision=fp16_mixed"
    )
    layout = import_(text, gpus=4).layout
    assert (layout.tp, layout.microbatch, layout.precision) == (4, 2, "fp16")


def test_an_absent_field_has_the_value_of_the_common_recipe() -> None:
    layout = import_("model:\n  tensor_model_parallel_size: 2\n", gpus=4).layout
    assert (layout.zero, layout.overlap_gradients, layout.precision) == (1, True, "bf16")


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"precision": "mxfp8"}, "bf16_with_mxfp8_mixed"),
        ({"precision": "nvfp4"}, "bf16_with_nvfp4_mixed"),
        ({"precision": "fp16", "gradient_precision": "fp16"}, "fp16_mixed"),
        ({"precision": "fp32"}, None),
    ],
)
def test_a_named_precision_is_used_where_it_says_it_all(
    fields: dict[str, Any], wanted: str | None
) -> None:
    assert export(Layout(**fields)).data["mixed_precision"] == wanted


def test_a_precision_without_a_name_is_spelled_out() -> None:
    mixed = export(Layout(gradient_precision="bf16")).data["mixed_precision"]
    assert mixed["_target_"].endswith("MixedPrecisionConfig")
    assert mixed["grad_reduce_in_fp32"] is False


def test_a_mistyped_field_is_refused_with_the_right_one() -> None:
    with pytest.raises(InputError, match=r"did you mean model\.tensor_model_parallel_size"):
        import_("model:\n  tensor_model_paralel_size: 2\n")


def test_other_sections_and_fields_are_passed_over() -> None:
    text = (
        "model: {tensor_model_parallel_size: 2, init_method_std: 0.01}\nlogger: {log_interval: 1}"
    )
    imported = import_(text, gpus=2)
    assert set(imported.ignored) == {"model.init_method_std", "logger.log_interval"}


def test_a_layer_list_is_a_list_and_not_an_expression() -> None:
    from meshwright.spec.model import Experts

    experts = Experts(count=4, top_k=2, width=64)
    model = decoder("m", layers=3, hidden=64, heads=4, ffn=128, vocab=256, experts=experts,
                    dense_layers=1)  # fmt: skip
    assert export(Layout(), model).data["model"]["moe_layer_freq"] == [0, 1, 1]
