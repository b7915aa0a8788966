"""Which catalog device a trace was made on, and what it can do at most."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from meshwright.observe.hardware.catalog_device import find_catalog_device
from meshwright.timeline.timeline import Timeline

if TYPE_CHECKING:
    from meshwright.spec.cluster import Gpu


def find_trace_device(timeline: Timeline) -> "Gpu | None":
    """The device that a trace names, if the catalog has it."""
    name = read_device_name(timeline.metadata)
    return find_catalog_device(name) if name else None


def read_device_name(metadata: Mapping[str, str]) -> str:
    """What a trace calls its first device; empty where it names none."""
    try:
        devices: Any = msgspec.json.decode(metadata.get("devices", "[]") or "[]")
    except msgspec.DecodeError:
        return ""
    first = devices[0] if isinstance(devices, list) and devices else {}
    return str(first.get("name", "")) if isinstance(first, dict) else ""


def find_peak_flops(device: "Gpu", dtype: str, kernel: str = "") -> float | None:
    """The device's dense peak for an element type; fp32 in tensor cores where a kernel says so."""
    if dtype == "fp32" and re.search(r"tf32|tensorop|s1688gemm", kernel):
        return device.tf32_flops or device.fp32_flops
    field = {
        "bf16": device.bf16_flops,
        "fp16": device.fp16_flops,
        "fp32": device.fp32_flops,
        "fp8": device.fp8_flops,
        "fp4": device.fp4_flops,
        "int8": device.int8_ops,
    }
    return field.get(dtype)
