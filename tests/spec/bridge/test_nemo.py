"""Megatron-Bridge recipes: YAML overrides, saved configurations, Hydra words, Python lines."""

from typing import Any

import pytest
import yaml

from meshwright.errors import InputError
from meshwright.spec.bridge.nemo import export_config, import_config
from meshwright.spec.bridge.spec_diff import diff_models
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model import build_decoder_model

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
    data = yaml.safe_load(export_config(Layout(tp=2, dp=4, zero=1, global_batch=8)).text)
    assert data["model"]["tensor_model_parallel_size"] == 2
    assert data["train"] == {"micro_batch_size": 1, "global_batch_size": 8}
    assert data["ddp"]["use_distributed_optimizer"] is True
    assert data["mixed_precision"] == "bf16_mixed"


def test_what_is_off_is_written_too_because_a_recipe_may_have_it_on() -> None:
    data = yaml.safe_load(export_config(Layout()).text)
    assert data["model"]["recompute_granularity"] is None
    assert data["ddp"]["use_distributed_optimizer"] is False
    assert data["optimizer"]["use_distributed_optimizer"] is False
    assert data["comm_overlap"] is None


def test_the_lines_of_a_recipe_function_are_read_and_not_run() -> None:
    imported = import_config(RECIPE, gpus=64)
    assert imported.layout == Layout(
        tp=4, pp=4, virtual_stages=5, schedule="interleaved", cp=2, dp=2, sequence_parallel=True,
        zero=1, global_batch=512, overlap_tp=True, moment_precision="bf16",
    )  # fmt: skip
    assert imported.sequence_length == 8192


def test_hydra_words_are_read() -> None:
    text = (
        "model.tensor_model_parallel_size=4 ++train.micro_batch_size=2 mixed_precision=fp16_mixed"
    )
    layout = import_config(text, gpus=4).layout
    assert (layout.tp, layout.microbatch, layout.precision) == (4, 2, "fp16")


def test_an_absent_field_has_the_value_of_the_common_recipe() -> None:
    layout = import_config("model:\n  tensor_model_parallel_size: 2\n", gpus=4).layout
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
    assert export_config(Layout(**fields)).data["mixed_precision"] == wanted


def test_a_precision_without_a_name_is_spelled_out() -> None:
    mixed = export_config(Layout(gradient_precision="bf16")).data["mixed_precision"]
    assert mixed["_target_"].endswith("MixedPrecisionConfig")
    assert mixed["grad_reduce_in_fp32"] is False


def test_a_mistyped_field_is_refused_with_the_right_one() -> None:
    with pytest.raises(InputError, match=r"did you mean model\.tensor_model_parallel_size"):
        import_config("model:\n  tensor_model_paralel_size: 2\n")


def test_other_sections_and_fields_are_passed_over() -> None:
    text = (
        "model: {tensor_model_parallel_size: 2, init_method_std: 0.01}\nlogger: {log_interval: 1}"
    )
    imported = import_config(text, gpus=2)
    assert set(imported.ignored) == {"model.init_method_std", "logger.log_interval"}


def test_a_layer_list_is_a_list_and_not_an_expression() -> None:
    from meshwright.spec.model import MoESpec

    experts = MoESpec(count=4, top_k=2, width=64)
    model = build_decoder_model("m", layers=3, hidden=64, heads=4, ffn=128, vocab=256,
                                experts=experts, dense_layers=1)  # fmt: skip
    assert export_config(Layout(), model).data["model"]["moe_layer_freq"] == [0, 1, 1]


NEMO_1 = """
name: megatron_llama
trainer: {devices: 8, num_nodes: 4, precision: bf16, max_steps: 100000, gradient_clip_val: 1.0}
exp_manager:
  explicit_log_dir: null
  checkpoint_callback_params:
    model_parallel_size: ${multiply:${model.tensor_model_parallel_size}, 2}
model:
  mcore_gpt: True
  micro_batch_size: 4
  global_batch_size: 64
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: null
  context_parallel_size: ???
  encoder_seq_length: 4096
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 12
  hidden_size: 768
  ffn_hidden_size: 3072
  num_attention_heads: 12
  hidden_dropout: 0.0
  attention_dropout: 0.0
  ffn_dropout: 0.0
  kv_channels: null
  normalization: rmsnorm
  layernorm_epsilon: 1e-6
  make_vocab_size_divisible_by: 128
  bias: False
  activation: fast-swiglu
  position_embedding_type: rope
  rotary_percentage: 1.0
  share_embeddings_and_output_weights: False
  num_query_groups: null
  tokenizer: {library: sentencepiece, model: "???"}
  megatron_amp_O2: True
  activations_checkpoint_granularity: full
  activations_checkpoint_method: block
  activations_checkpoint_num_layers: 3
  sequence_parallel: True
  transformer_engine: True
  fp8: False
  fp8_e4m3: False
  fp8_hybrid: False
  data: {data_impl: mmap, seq_length: "${model.encoder_seq_length}", num_workers: 2}
  optim: {name: distributed_fused_adam, lr: 2e-4, overlap_grad_sync: False}
"""
NEMO_2 = """
trainer:
  _target_: nemo.lightning.Trainer
  devices: 8
  num_nodes: 8
  strategy:
    _target_: nemo.lightning.MegatronStrategy
    tensor_model_parallel_size: 4
    pipeline_model_parallel_size: 4
    virtual_pipeline_model_parallel_size: 5
    sequence_parallel: true
    pipeline_dtype: torch.bfloat16
    ddp: {grad_reduce_in_fp32: true, overlap_grad_reduce: true, overlap_param_gather: true}
  plugins: {precision: bf16-mixed, params_dtype: torch.bfloat16}
  callbacks:
  - {_target_: MegatronCommOverlapCallback, tp_comm_overlap: true}
data: {seq_length: 8192, global_batch_size: 512, micro_batch_size: 1}
optim:
  config: {optimizer: adam, lr: 0.0003, use_distributed_optimizer: true}
"""


def test_a_nemo_1_file_is_read_with_its_model() -> None:
    imported = import_config(NEMO_1, vocab=32000)
    assert imported.layout == Layout(
        tp=4, pp=2, dp=4, sequence_parallel=True, zero=1, microbatch=4, global_batch=64,
        recompute="full", recompute_layers=3, overlap_gradients=False, overlap_parameters=False,
        overlap_pp=False,
    )  # fmt: skip
    assert imported.sequence_length == 4096
    # 32,000 rows are padded to a multiple of 128 × tp.
    expected = build_decoder_model(
        "imported", layers=12, hidden=768, heads=12, ffn=3072, vocab=32256
    )
    assert imported.model is not None
    assert [d.path for d in diff_models(expected, imported.model)] == ["norm.eps"]
    assert imported.unknown == ()
    assert "trainer.max_steps" in imported.ignored
    assert not {"trainer.precision", "model.optim.name"} & set(imported.ignored)


def test_a_nemo_1_file_without_a_vocabulary_says_what_its_model_lacks() -> None:
    imported = import_config(NEMO_1)
    assert imported.model is None
    assert [problem.where for problem in imported.unknown] == ["model.vocab_size"]


def test_a_nemo_2_file_is_read() -> None:
    imported = import_config(NEMO_2)
    assert imported.layout == Layout(
        tp=4, pp=4, virtual_stages=5, schedule="interleaved", dp=4, sequence_parallel=True, zero=1,
        global_batch=512, overlap_tp=True,
    )  # fmt: skip
    assert imported.sequence_length == 8192
    assert imported.unknown == ()


def test_batch_sizes_of_nemo_1_beside_degrees_of_nemo_2_are_read() -> None:
    text = (
        "trainer: {precision: bf16, strategy: {pipeline_model_parallel_size: 4}}\n"
        "model: {global_batch_size: 32, micro_batch_size: 2}\n"
    )
    layout = import_config(text, gpus=16).layout
    assert (layout.pp, layout.dp, layout.global_batch, layout.microbatch) == (4, 4, 32, 2)


@pytest.mark.parametrize(
    "text",
    [
        "python pretrain.py trainer.devices=8 model.tensor_model_parallel_size=2 "
        "model.global_batch_size=64",
        "recipe.trainer.strategy.tensor_model_parallel_size = 2\n"
        "recipe.data.global_batch_size = 64\nrecipe.trainer.devices = 8\n",
        "recipe.trainer.strategy = run.Config(MegatronStrategy, tensor_model_parallel_size=2)\n"
        "recipe.data = run.Config(Mock, global_batch_size=64)\nrecipe.trainer.devices = 8\n",
    ],
)
def test_older_settings_are_read_from_words_and_lines_too(text: str) -> None:
    layout = import_config(text).layout
    assert (layout.tp, layout.dp, layout.global_batch) == (2, 4, 64)


@pytest.mark.parametrize(
    ("precision", "wanted"), [("bf16-mixed", "bf16"), ("16", "fp16"), (32, "fp32")]
)
def test_the_precision_of_an_older_trainer_is_read(precision: object, wanted: str) -> None:
    data = {"trainer": {"precision": precision}, "model": {"micro_batch_size": 1}}
    assert import_config(data, gpus=1).layout.precision == wanted


@pytest.mark.parametrize("said", [{}, {"trainer.precision": "transformer-engine"}])
def test_an_older_file_without_a_known_precision_says_what_is_read(said: dict[str, str]) -> None:
    imported = import_config({"trainer.devices": 1, "model.micro_batch_size": 1, **said})
    assert imported.layout.precision == "bf16"
    assert [problem.where for problem in imported.unknown] == ["trainer.precision"]


@pytest.mark.parametrize(
    ("given", "name", "overlap"),
    [({}, "distributed_fused_adam", True), ({}, "mcore_distributed_optim", False),
     ({"overlap_grad_sync": True}, "mcore_distributed_optim", True)],
)  # fmt: skip
def test_the_optimizer_of_nemo_1_says_how_gradients_are_reduced(
    given: dict[str, Any], name: str, overlap: bool
) -> None:
    optim = {"name": name, **given}
    data = {"trainer": {"precision": "bf16"}, "model": {"micro_batch_size": 1, "optim": optim}}
    layout = import_config(data, gpus=2).layout
    assert (layout.zero, layout.overlap_gradients) == (1, overlap)


@pytest.mark.parametrize(
    ("strategy", "match"),
    [
        ("tensor_model_paralel_size: 2", r"did you mean trainer\.strategy\.tensor_model_parallel"),
        ("tensor_model_parallel_size: x", r"trainer\.strategy\.tensor_model_parallel_size: 'x'"),
    ],
)
def test_a_fault_in_an_older_file_names_the_field_as_it_stands_there(
    strategy: str, match: str
) -> None:
    text = f"trainer:\n  strategy:\n    context_parallel_size: 1\n    {strategy}\n"
    with pytest.raises(InputError, match=match):
        import_config(text)


def test_a_file_without_a_field_that_is_known_is_refused() -> None:
    with pytest.raises(InputError, match="no NeMo or Megatron-Bridge settings"):
        import_config("logger: {log_interval: 1}\n")
