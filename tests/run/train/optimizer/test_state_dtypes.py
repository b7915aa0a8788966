"""A layout's formats are kept, or refused with what would work."""

import pytest

pytest.importorskip("torch", reason="formats are torch types")

import torch

from meshwright.errors import InputError
from meshwright.run.train.optimizer.state_dtypes import StateDtypes, get_state_dtypes
from meshwright.spec.layout import Layout


def test_formats_are_those_of_the_layout() -> None:
    layout = Layout(master_precision="none", moment_precision="int8", gradient_precision="bf16")
    assert get_state_dtypes(layout) == StateDtypes(False, "int8", torch.bfloat16)


def test_every_format_that_is_not_kept_is_named() -> None:
    layout = Layout(master_precision="fp16", moment_precision="fp8", gradient_precision="int8")
    with pytest.raises(InputError) as caught:
        get_state_dtypes(layout)
    assert [problem.where for problem in caught.value.problems] == [
        "layout.master_precision",
        "layout.moment_precision",
        "layout.gradient_precision",
    ]


def test_fp16_weights_need_a_master() -> None:
    layout = Layout(precision="fp16", master_precision="none")
    with pytest.raises(InputError, match="master_precision"):
        get_state_dtypes(layout)
