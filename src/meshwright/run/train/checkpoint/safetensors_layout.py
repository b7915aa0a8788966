"""`SafetensorsLayout`: which bytes of a rank's safetensors file hold which box of which tensor.

A file is eight bytes of header length, a JSON header and the data without gaps
(https://huggingface.co/docs/safetensors). A box that is a whole tensor is stored under the
tensor's name, so any reader of safetensors opens what one process saved; others get the box's
slices after the name, such as `embedding.weight[0:512,0:64]`.
"""

import json
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.train.checkpoint.metadata import DTYPE_BYTES

_ALIGNMENT = 64
"""Start of the data, in bytes: every element and every cache line starts at its own multiple."""

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class WrittenBox(NamedTuple):
    """A part of a tensor that one rank writes."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Its size in a file."""
        return math.prod(self.sizes) * DTYPE_BYTES[self.dtype]

    @property
    def key(self) -> str:
        """Its name in a file."""
        if self.sizes == self.shape:
            return self.tensor
        slices = zip(self.offsets, self.sizes, strict=True)
        return f"{self.tensor}[{','.join(f'{first}:{first + size}' for first, size in slices)}]"


class SafetensorsLayout(NamedTuple):
    """A file before it is written."""

    name: str
    header: bytes
    written_boxes: tuple[WrittenBox, ...]
    """In the order of the file."""
    starts: tuple[int, ...]
    """The byte of the file at which each box starts."""
    data_bytes: int


def make_safetensors_layout(rank: int, boxes: Iterable[WrittenBox]) -> SafetensorsLayout:
    """Arrange the boxes of a rank; the same boxes always give the same file."""
    # Wide elements first: then each starts at a multiple of its size without padding.
    placed = sorted(boxes, key=lambda box: (-DTYPE_BYTES[box.dtype], box.tensor, box.offsets))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts = []
    end = 0
    for box in placed:
        starts.append(end)
        entries[box.key] = {
            "dtype": box.dtype,
            "shape": box.sizes,
            "data_offsets": (end, end + box.size_bytes),
        }
        end += box.size_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return SafetensorsLayout(
        name=f"rank-{rank:05d}.safetensors",
        header=header,
        written_boxes=tuple(placed),
        starts=tuple(len(header) + start for start in starts),
        data_bytes=end,
    )


def get_dtype_name(dtype: torch.dtype, where: str) -> str:
    """Return the name of an element type in files."""
    name = _NAMES.get(dtype)
    if name is None:
        known = ", ".join(str(known).removeprefix("torch.") for known in _NAMES)
        raise InputError([Problem(where, f"{dtype} cannot be saved", f"use one of {known}")])
    return name
