"""The formats of an optimizer's state, as a layout names them and as this trainer keeps them."""

from typing import NamedTuple, cast

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.optimizer.update_inputs import MomentDtype
from meshwright.spec.layout import Layout

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class StateDtypes(NamedTuple):
    """In which formats an optimizer works."""

    has_master_weights: bool
    """Whether weights below float32 have a float32 master."""
    moment_dtype: MomentDtype
    gradients: torch.dtype
    """In which gradients are accumulated."""


def get_state_dtypes(layout: Layout) -> StateDtypes:
    """Return the formats a layout asks for, or say which of them are not kept here."""
    problems = []

    def only(name: str, *allowed: str) -> None:
        given = getattr(layout, name)
        if given not in allowed:
            what = f"{given} is not kept by this optimizer"
            problems.append(Problem(f"layout.{name}", what, f"use {' or '.join(allowed)}"))

    only("master_precision", "fp32", "none")
    only("moment_precision", "fp32", "bf16", "int8")
    only(
        "gradient_precision",
        *(("fp32", "fp16") if layout.precision == "fp16" else ("fp32", "bf16")),
    )
    if layout.precision == "fp16" and layout.master_precision == "none":
        what = "fp16 weights cannot hold small updates"
        problems.append(Problem("layout.master_precision", what, "use fp32, or precision bf16"))
    if problems:
        raise InputError(problems)
    return StateDtypes(
        has_master_weights=layout.master_precision == "fp32",
        moment_dtype=cast(MomentDtype, layout.moment_precision),
        gradients=_DTYPES[layout.gradient_precision],
    )
