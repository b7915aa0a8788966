"""DeepSpeed's JSON."""

import json
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.spec.bridge.deepspeed import export_config, import_config
from meshwright.spec.bridge.deepspeed.ds_config_keys import IGNORED, KEYS
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model import build_decoder_model

ZERO3: dict[str, Any] = {
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "stage3_max_live_parameters": 1e9,
    },
    "gradient_clipping": 1.0,
    "steps_per_print": 100,
}


def test_a_zero3_file_is_read() -> None:
    sizes = {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
    }  # fmt: skip
    imported = import_config(json.dumps(ZERO3 | sizes))
    assert imported.layout == Layout(
        dp=8, zero=3, microbatch=2, global_batch=64, gradient_precision="bf16",
        offload=("gradients", "optimizer"),
    )  # fmt: skip
    assert "gradient_clipping" in imported.ignored
    assert imported.unknown == ()


def test_the_three_batch_sizes_tell_the_number_of_replicas() -> None:
    data = {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 8}  # fmt: skip
    assert import_config(data).layout.dp == 4


def test_values_left_to_the_trainer_are_said() -> None:
    imported = import_config(ZERO3 | {"train_micro_batch_size_per_gpu": "auto"}, gpus=4)
    assert [problem.where for problem in imported.unknown] == ["train_micro_batch_size_per_gpu"]
    assert imported.layout.dp == 4


HUGGING_FACE: dict[str, Any] = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2,
             "initial_scale_power": 16, "min_loss_scale": 1, "auto_cast": False},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
        "offload_optimizer": None,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip


def test_a_file_that_leaves_things_to_hugging_face_s_trainer_is_read() -> None:
    imported = import_config(HUGGING_FACE, gpus=8)
    assert imported.layout == Layout(dp=8, zero=3, gradient_precision="bf16")
    assert {problem.where: problem.fix.rpartition(" as ")[2] for problem in imported.unknown} == {
        "bf16.enabled": "bf16",
        "fp16.enabled": "fp16",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "train_batch_size": "per_device_train_batch_size and gradient_accumulation_steps",
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    }


@pytest.mark.parametrize(
    ("bf16", "fp16", "precision"),
    [
        ("auto", None, "bf16"),
        ("auto", "auto", "bf16"),
        ("auto", False, "bf16"),
        ("auto", True, "fp16"),
        (True, "auto", "bf16"),
        (False, "auto", "fp16"),
        (None, "auto", "fp16"),
        (False, False, "fp32"),
    ],
)
def test_a_precision_left_open_is_not_taken_for_off(bf16: Any, fp16: Any, precision: str) -> None:
    data = {"bf16": {"enabled": bf16}, "fp16": {"enabled": fp16}, "train_batch_size": 8}
    assert import_config(data, gpus=1).layout.precision == precision


@pytest.mark.parametrize(
    ("steps", "micro"), [(2, 4), (None, 8), ("auto", 1)]
)  # fmt: skip
def test_an_open_microbatch_is_worked_out_only_from_what_is_said(steps: Any, micro: int) -> None:
    data = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": steps}  # fmt: skip
    layout = import_config(data, gpus=8).layout
    assert (layout.microbatch, layout.global_batch) == (micro, 64)


def test_an_open_microbatch_makes_no_batch() -> None:
    data = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 4}
    assert import_config(data, gpus=8).layout.global_batch is None


ORDINARY = {
    "zero_optimization": """
        reduce_bucket_size allgather_bucket_size allgather_partitions reduce_scatter
        contiguous_gradients round_robin_gradients sub_group_size ignore_unused_parameters
        use_multi_rank_bucket_allreduce stage3_max_live_parameters stage3_max_reuse_distance
        stage3_param_persistence_threshold stage3_model_persistence_threshold
        stage3_gather_16bit_weights_on_model_save stage3_module_granularity_threshold
        stage3_use_all_reduce_for_fetch_params zero_quantized_nontrainable_weights
        mics_hierarchical_params_gather memory_efficient_linear elastic_checkpoint
        cpu_offload_use_pin_memory load_from_fp32_weights log_trace_cache_warnings""",
    "fp16": """
        auto_cast loss_scale initial_scale_power loss_scale_window hysteresis
        consecutive_hysteresis min_loss_scale""",
    "bf16": "immediate_grad_update check_grad_overflow",
    "activation_checkpointing": """
        partition_activations number_checkpoints contiguous_memory_optimization
        synchronize_checkpoint_boundary profile""",
    "pipeline": "partition seed_layers pipe_partitioned grad_partitioned",
    "flops_profiler": "enabled profile_step module_depth top_modules detailed output_file",
    "tensorboard": "enabled output_path job_name",
    "wandb": "enabled team project",
    "comms_logger": "enabled verbose prof_all debug",
    "aio": "block_size queue_depth single_submit overlap_events",
    "scheduler": "type",
}


def test_keys_without_bearing_are_known_and_passed_over() -> None:
    data: dict[str, Any] = {part: dict.fromkeys(keys.split(), 1) for part, keys in ORDINARY.items()}
    data["zero_optimization"] |= {"stage": 3, "zeropp_loco_param": {"err_beta": 0.8}}
    offload = {"device": "cpu", "pin_memory": True, "buffer_count": 4, "nvme_path": "/x"}
    more = {"pipeline_read": True, "pipeline_write": True, "fast_init": True, "ratio": 1.0}
    data["zero_optimization"]["offload_optimizer"] = offload | more
    data["zero_optimization"]["offload_param"] = offload | {"buffer_size": 1e8, "max_in_cpu": 1e9}
    data |= {"wall_clock_breakdown": False, "memory_breakdown": False, "dump_state": False,
             "prescale_gradients": False, "communication_data_type": "fp32"}  # fmt: skip
    imported = import_config(data, gpus=8)
    assert imported.unknown == ()
    assert "zero_optimization.reduce_bucket_size" in imported.ignored
    assert imported.layout.offload == ("gradients", "optimizer", "parameters")


def test_a_key_that_is_not_known_is_said_and_not_refused() -> None:
    imported = import_config(ZERO3 | {"our_own": {"thing": 1}, "zero_stages": 3}, gpus=1)
    assert [problem.where for problem in imported.unknown] == ["our_own.thing", "zero_stages"]


def test_no_key_is_both_read_and_passed_over() -> None:
    assert not [key for key in KEYS if IGNORED.fullmatch(key)]


@pytest.mark.parametrize(
    "zero",
    [
        {"offload_optimizer": {"device": "nvme", "nvme_path": "/local"}},
        {"offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        {"zero_quantized_weights": True},
        {"zero_quantized_gradients": True},
        {"zero_hpz_partition_size": 8},
    ],
)
def test_what_a_layout_holds_only_in_part_is_said(zero: dict[str, Any]) -> None:
    data = ZERO3 | {"zero_optimization": {"stage": 3, **zero}}
    assert len(import_config(data, gpus=8).unknown) == 1


def test_what_only_code_can_do_is_said_even_where_the_file_says_it() -> None:
    exported = export_config(Layout(pp=2, dp=2, zero=1, overlap_pp=False, overlap_parameters=False))
    assert exported.data["pipeline"] == {"stages": 2}
    assert [problem.where for problem in exported.unexpressed] == ["layout.pp"]


def test_the_file_holds_no_architecture() -> None:
    model = build_decoder_model("m", layers=2, hidden=64, heads=4, ffn=128, vocab=256)
    exported = export_config(Layout(dp=2, zero=3), model, sequence_length=128)
    assert [problem.where for problem in exported.unexpressed] == ["model", "sequence_length"]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"zero_optimization": {"stage": 4}}, "not one of 0, 1, 2, 3"),
        ({"zero_optimization": {"stag": 3}}, r"did you mean zero_optimization\.stage"),
        ({"zero_optimisation": {"stage": 3}}, r"did you mean zero_optimization\.stage"),
        ({"train_micro_batch_size": 3}, "did you mean train_micro_batch_size_per_gpu"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "together with bf16"),
        ({"train_micro_batch_size_per_gpu": -1}, "at least 1"),
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "not a multiple"),
    ],
)
def test_what_deepspeed_would_refuse_is_refused(data: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        import_config(data, gpus=1)


def test_zero_as_a_switch_is_stage_one() -> None:
    assert import_config({"zero_optimization": True, "bf16": {"enabled": True}}).layout.zero == 1


def test_gradients_take_the_format_of_the_weights_unless_told_otherwise() -> None:
    base = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    assert import_config(base).layout.gradient_precision == "bf16"
    told = base | {"data_types": {"grad_accum_dtype": "fp32"}}
    assert import_config(told).layout.gradient_precision == "fp32"
