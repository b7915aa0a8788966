"""What a published run means by memory: which reading, in which unit.

The row's own words come first. Where it only says `GB`, the program it ran decides: each prints
one of PyTorch's counters or the driver's, in its own unit. It does not predict anything.
"""

import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from meshwright.predict.memory.memory_prediction import StageMemory

MemoryCounter = Literal["counted", "allocated", "reserved", "device"]

GIB, GB = float(2**30), 1e9


class MemoryMetric(NamedTuple):
    """How a published figure of memory is to be read."""

    counter: MemoryCounter
    """Computed on paper, the peak of all tensors, the allocator's pool, or the whole process."""
    unit_bytes: float
    """Bytes of one of its gigabytes."""


_WORDS: tuple[tuple[str, MemoryCounter], ...] = (
    ("analytic", "counted"),
    ("nvidia-smi", "device"),
    ("reserved", "reserved"),
    ("allocated", "allocated"),
)

_PROGRAMS: tuple[tuple[str, MemoryMetric], ...] = (
    # Narrow names first: a source may name more than one.
    ("korthikanti", MemoryMetric("counted", GIB)),
    ("zero bubble", MemoryMetric("allocated", GB)),  # prints max_memory_allocated // 10**6
    ("megatron", MemoryMetric("allocated", GB)),  # logs max_memory_allocated / 10**9
    ("nanotron", MemoryMetric("allocated", GIB)),
    ("torchtitan", MemoryMetric("reserved", GIB)),
    ("torchao", MemoryMetric("reserved", GIB)),
    ("colossal", MemoryMetric("allocated", GIB)),
    ("bloom", MemoryMetric("device", GIB)),
    ("internevo", MemoryMetric("device", GIB)),
)

_UNKNOWN = MemoryMetric("reserved", GIB)
"""Taken where neither words nor program are known: the middle reading, in the driver's unit."""


def classify_memory_metric(row: Mapping[str, Any]) -> MemoryMetric:
    """Return what a row's figure of memory means."""
    notes = str(row.get("notes") or "").lower()
    source = f"{row.get('family') or ''} {row.get('source') or ''}".lower()
    usual = next((kind for name, kind in _PROGRAMS if name in source), _UNKNOWN)
    said = next((reading for word, reading in _WORDS if word in notes), usual.counter)
    unit = GIB if re.search(r"\b[gm]ib\b", notes) else usual.unit_bytes
    return MemoryMetric(said, unit)


def measured_bytes(row: Mapping[str, Any]) -> float | None:
    """Return the memory a row measured, in bytes, or None where it measured none."""
    figure = (row.get("measured") or {}).get("memory_gb")
    return float(figure) * classify_memory_metric(row).unit_bytes if figure else None


def get_comparable_bytes(stage: StageMemory, reading: MemoryCounter) -> int:
    """Return the memory of a stage as a source would read it."""
    return {
        "counted": stage.counted_bytes,
        "allocated": stage.allocated_bytes,
        "reserved": stage.reserved_bytes,
        "device": stage.total_bytes,
    }[reading]
