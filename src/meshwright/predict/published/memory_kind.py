"""What a published run means by memory: which reading, in which unit.

The row's own words come first. Where it only says `GB`, the program it ran decides: each prints
one of PyTorch's counters or the driver's, in its own unit. It does not predict anything.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from meshwright.predict.memory import StageMemory

Reading = Literal["counted", "allocated", "reserved", "device"]

GIB, GB = float(2**30), 1e9


class MemoryKind(NamedTuple):
    """How a published figure of memory is to be read."""

    reading: Reading
    """Computed on paper, the peak of all tensors, the allocator's pool, or the whole process."""
    unit_bytes: float
    """Bytes of one of its gigabytes."""


_WORDS: tuple[tuple[str, Reading], ...] = (
    ("analytic", "counted"),
    ("nvidia-smi", "device"),
    ("reserved", "reserved"),
    ("allocated", "allocated"),
)

_PROGRAMS: tuple[tuple[str, MemoryKind], ...] = (
    # Narrow names first: a source may name more than one.
    ("korthikanti", MemoryKind("counted", GIB)),
    ("zero bubble", MemoryKind("allocated", GB)),  # prints max_memory_allocated // 10**6
    ("megatron", MemoryKind("allocated", GB)),  # logs max_memory_allocated / 10**9
    ("nanotron", MemoryKind("allocated", GIB)),
    ("torchtitan", MemoryKind("reserved", GIB)),
    ("torchao", MemoryKind("reserved", GIB)),
    ("colossal", MemoryKind("allocated", GIB)),
    ("bloom", MemoryKind("device", GIB)),
    ("internevo", MemoryKind("device", GIB)),
)

_UNKNOWN = MemoryKind("reserved", GIB)
"""Taken where neither words nor program are known: the middle reading, in the driver's unit."""


def memory_kind(row: Mapping[str, Any]) -> MemoryKind:
    """Return what a row's figure of memory means."""
    notes = str(row.get("notes") or "").lower()
    source = f"{row.get('family') or ''} {row.get('source') or ''}".lower()
    usual = next((kind for name, kind in _PROGRAMS if name in source), _UNKNOWN)
    said = next((reading for word, reading in _WORDS if word in notes), usual.reading)
    unit = GIB if re.search(r"\b[gm]ib\b", notes) else usual.unit_bytes
    return MemoryKind(said, unit)


def measured_bytes(row: Mapping[str, Any]) -> float | None:
    """Return the memory a row measured, in bytes, or None where it measured none."""
    figure = (row.get("measured") or {}).get("memory_gb")
    return float(figure) * memory_kind(row).unit_bytes if figure else None


def read_as(stage: StageMemory, reading: Reading) -> int:
    """Return the memory of a stage as a source would read it."""
    return {
        "counted": stage.counted_bytes,
        "allocated": stage.allocated_bytes,
        "reserved": stage.reserved_bytes,
        "device": stage.total_bytes,
    }[reading]
