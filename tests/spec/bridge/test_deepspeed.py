"""DeepSpeed's JSON."""

import json
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.spec.bridge.deepspeed import export, import_
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model import decoder

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
    imported = import_(json.dumps(ZERO3 | sizes))
    assert imported.layout == Layout(
        dp=8, zero=3, microbatch=2, global_batch=64, gradient_precision="bf16",
        offload=("gradients", "optimizer"),
    )  # fmt: skip
    assert "gradient_clipping" in imported.ignored
    assert imported.unknown == ()


def test_the_three_batch_sizes_tell_the_number_of_replicas() -> None:
    data = {"train_batch_size": 96, "train_micro_batch_size_per_gpu": 3,
            "gradient_accumulation_steps": 8}  # fmt: skip
    assert import_(data).layout.dp == 4


def test_values_left_to_the_trainer_are_said() -> None:
    imported = import_(ZERO3 | {"train_micro_batch_size_per_gpu": "auto"}, gpus=4)
    assert [problem.where for problem in imported.unknown] == ["train_micro_batch_size_per_gpu"]
    assert imported.layout.dp == 4


def test_what_only_code_can_do_is_said_even_where_the_file_says_it() -> None:
    exported = export(Layout(pp=2, dp=2, zero=1, overlap_pp=False, overlap_parameters=False))
    assert exported.data["pipeline"] == {"stages": 2}
    assert [problem.where for problem in exported.unexpressed] == ["layout.pp"]


def test_the_file_holds_no_architecture() -> None:
    model = decoder("m", layers=2, hidden=64, heads=4, ffn=128, vocab=256)
    exported = export(Layout(dp=2, zero=3), model, sequence_length=128)
    assert [problem.where for problem in exported.unexpressed] == ["model", "sequence_length"]


@pytest.mark.parametrize(
    ("data", "match"),
    [
        ({"zero_optimization": {"stage": 4}}, "not one of 0, 1, 2, 3"),
        ({"zero_optimization": {"stag": 3}}, r"did you mean zero_optimization\.stage"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "together with bf16"),
        ({"train_micro_batch_size_per_gpu": -1}, "at least 1"),
        ({"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2}, "not a multiple"),
    ],
)
def test_what_deepspeed_would_refuse_is_refused(data: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        import_(data, gpus=1)


def test_zero_as_a_switch_is_stage_one() -> None:
    assert import_({"zero_optimization": True, "bf16": {"enabled": True}}).layout.zero == 1


def test_gradients_take_the_format_of_the_weights_unless_told_otherwise() -> None:
    base = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    assert import_(base).layout.gradient_precision == "bf16"
    told = base | {"data_types": {"grad_accum_dtype": "fp32"}}
    assert import_(told).layout.gradient_precision == "fp32"
