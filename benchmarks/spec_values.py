"""How fast spec values are made, beside a plain frozen dataclass with the same fields."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from meshwright.spec.catalog import architectures, hardware
from meshwright.spec.layout import Layout

NAME = "spec_values"
QUESTION = "How many layouts does one core build and validate per second?"

REPEATS = 7


def grid(count: int) -> list[dict[str, Any]]:
    """List keyword arguments of sound layouts as a planner would try them."""
    sizes = itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 2), (1, 2, 4), (0, 1, 2, 3))
    layouts: list[dict[str, Any]] = []
    for tp, pp, cp, microbatch, zero in itertools.cycle(sizes):
        layouts.append(
            {
                "tp": tp, "pp": pp, "cp": cp, "dp": 32, "microbatch": microbatch, "zero": zero,
                "sequence_parallel": tp > 1, "global_batch": 1024, "shard": 32,
                "virtual_stages": 2 if pp > 1 else 1,
                "schedule": "interleaved" if pp > 1 else "1f1b",
                "recompute": "selective", "recompute_ops": ("core_attn", "mlp_act"),
                "ep": 4, "expert_tp": 1, "precision": "fp8-blockwise",
            }
        )  # fmt: skip
        if len(layouts) == count:
            return layouts
    raise AssertionError("unreachable: the grid repeats for ever")


def per_second(make: Callable[..., object], given: Iterable[dict[str, Any]], count: int) -> float:
    """Return how many values `make` builds in a second, the median of some runs."""
    rates = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for values in given:
            make(**values)
        rates.append(count / (time.perf_counter() - start))
    return statistics.median(rates)


def plain_dataclass() -> type:
    """Make a frozen dataclass with the fields of `Layout` and no validation at all."""
    fields = [
        (field.name, field.type, dataclasses.field(default=field.default))
        for field in msgspec.structs.fields(Layout)
    ]
    return dataclasses.make_dataclass("Plain", fields, frozen=True, slots=True, kw_only=True)


def measure(quick: bool) -> dict[str, object]:
    """Measure and return the figures."""
    count = 20_000 if quick else 200_000
    given = grid(count)
    start = time.perf_counter()
    models = architectures.list_models()
    models_s = time.perf_counter() - start
    start = time.perf_counter()
    machines = len(hardware.list_gpus()) + len(hardware.list_clusters())
    hardware_s = time.perf_counter() - start
    return {
        "figures": [
            {
                "name": "layouts built and validated",
                "value": per_second(Layout, given, count),
                "unit": "1/s",
                "target": ">= 200_000",
            },
            {"name": f"{len(models)} models read", "value": models_s * 1e3, "unit": "ms"},
            {"name": f"{machines} GPUs, clusters read", "value": hardware_s * 1e3, "unit": "ms"},
        ],
        "peers": [
            {
                "name": "frozen dataclass, no validation",
                "value": per_second(plain_dataclass(), given, count),
                "unit": "1/s",
            }
        ],
        "notes": "One core. Layouts are a planner's grid: pipelines, experts, sharding, selective "
        "recompute, fp8. The catalog is read once, cold.",
    }
