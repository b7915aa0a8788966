"""The matrix products, convolutions and attentions that a trace names with their shapes.

Taken from the arguments of operators (`Input Dims`, `Input type`, `Concrete Inputs`), which a
profile has when it was made with `record_shapes=True`; `flops` has the rules. Knows operators; does
not know kernels.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Raw

from meshwright.observe.analyze.compute_efficiency.flop_formulas import FLOP_FORMULAS, OperatorCall
from meshwright.observe.analyze.spans.intervals import Ints, match_values
from meshwright.observe.analyze.spans.steps import mask_host_rows
from meshwright.timeline.memo import memoize
from meshwright.timeline.readers.parsing.arrow_arrays import take_rows
from meshwright.timeline.timeline import Timeline


class OperatorFlops(NamedTuple):
    """Calls of operators whose FLOPs are known, in the order of the timeline."""

    row: Ints
    """Row in the rank's timeline."""
    flops: npt.NDArray[Any]
    dtype: tuple[str, ...]
    """Element type of the first factor of each: `bf16`, `fp16`, `fp32`, `fp8`, …"""
    shape: tuple[str, ...]
    """Shapes of the factors of each: `[3072, 16384] [16384, 768]`."""
    num_gemms: Ints
    """How many products of one size each is, every one in a kernel of its own."""
    assumptions: tuple[str, ...]
    """What was taken for granted of each, because the trace does not say it; mostly nothing."""


class _Arguments(msgspec.Struct):
    dims: list[Any] = msgspec.field(default=[], name="Input Dims")
    types: list[str] = msgspec.field(default=[], name="Input type")
    given: list[Any] = msgspec.field(default=[], name="Concrete Inputs")


class _Texts(msgspec.Struct, gc=False):
    """The same, not decoded: most calls say what one before them said."""

    dims: Raw = msgspec.field(default=Raw(b"[]"), name="Input Dims")
    types: Raw = msgspec.field(default=Raw(b"[]"), name="Input type")
    given: Raw = msgspec.field(default=Raw(b"[]"), name="Concrete Inputs")


_DECODER = msgspec.json.Decoder(_Texts)
_DTYPES = {
    "c10::BFloat16": "bf16", "c10::Half": "fp16", "float": "fp32", "double": "fp64",
    "signed char": "int8", "c10::Float8_e4m3fn": "fp8", "c10::Float8_e5m2": "fp8",
    "c10::Float8_e4m3fnuz": "fp8", "c10::Float8_e5m2fnuz": "fp8", "c10::Float4_e2m1fn_x2": "fp4",
}  # fmt: skip


@memoize
def find_operator_flops(part: Timeline) -> OperatorFlops:
    """The calls of one rank's operators whose FLOPs are known."""
    if "extra" not in part.known_columns or "extra" not in part.spans.column_names:
        none = np.zeros(0, dtype=np.int64)
        return OperatorFlops(none, np.zeros(0), (), (), none, ())
    names = part.string_column("name")
    rows = np.flatnonzero(mask_host_rows(part) & match_values(names, FLOP_FORMULAS.__contains__))
    texts = take_rows(part.spans.column("extra"), rows).to_pylist()
    found = []
    for row, code, text in zip(rows.tolist(), names.codes[rows].tolist(), texts, strict=True):
        counted = _count(names.values[code], text)
        if counted is not None:
            found.append((row, *counted))
    return OperatorFlops(
        np.array([call[0] for call in found], dtype=np.int64),
        np.array([call[1] for call in found], dtype=np.float64),
        tuple(call[2] for call in found),
        tuple(call[3] for call in found),
        np.array([call[4] for call in found], dtype=np.int64),
        tuple(call[5] for call in found),
    )


CountedCall = tuple[float, str, str, int, str]


def _count(name: str, text: str | None) -> CountedCall | None:
    """FLOPs, element type, shapes and so on of one call; None where it says too little."""
    if not text:
        return None
    try:
        said = _DECODER.decode(text)
    except msgspec.MsgspecError:
        return None
    return count_call_flops(name, bytes(said.dims), bytes(said.types), bytes(said.given))


@lru_cache(1 << 14)
def count_call_flops(name: str, dims: bytes, types: bytes, given: bytes) -> CountedCall | None:
    """The same, of the JSON of its arguments."""
    try:
        arguments = _Arguments(
            msgspec.json.decode(dims, type=list[Any]),
            msgspec.json.decode(types, type=list[str]),
            msgspec.json.decode(given, type=list[Any]),
        )
        found = FLOP_FORMULAS[name](OperatorCall(arguments.dims, arguments.given))
    except (msgspec.MsgspecError, IndexError, TypeError, ValueError, ZeroDivisionError):
        return None
    if found is None:
        return None
    typed = next((kind for kind in arguments.types if kind in _DTYPES), "")
    shapes = [str(shape) for shape in arguments.dims if isinstance(shape, list) and len(shape) > 1]
    dtype = _DTYPES.get(typed, "")
    # Two numbers of 4 bits are one element of the shape.
    flops = 2 * found.flops if dtype == "fp4" else found.flops
    return flops, dtype, " ".join(shapes[:2]), found.num_gemms, found.assumption
