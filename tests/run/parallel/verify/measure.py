"""Measures what the tolerances of `verify` are made of; run it as a module, it takes minutes.

    python -m tests.run.parallel.verify.measure [fp32|bf16|fp16|fp8-…]

Every axis alone, under a model of each kind in the catalog, shrunk. Prints for each axis and kind
of tensor the largest error, where it was, and in 16-bit formats as a multiple of one device's.
"""

import pickle
import sys
from collections.abc import Iterator
from typing import Any

from meshwright.cli.verify import updates_for
from meshwright.errors import InputError
from meshwright.run.parallel.collective.launch import launch
from meshwright.run.parallel.verify.compare import Baseline, Deviation, deviations, rows_of
from meshwright.run.parallel.verify.fit import problems_of
from meshwright.run.parallel.verify.shrink import shrink
from meshwright.run.parallel.verify.step import Asked, run_step
from meshwright.run.parallel.verify.tolerances import KINDS, ROUNDING, sent_elsewhere
from meshwright.run.parallel.verify.verify import baseline, multiple_of
from meshwright.spec import catalog
from meshwright.spec.layout import Layout

MODELS = (
    "llama3.1-8b",
    "gpt3-125m",
    "gemma2-2b",
    "falcon-40b",
    "bloom-176b",
    "mixtral-8x7b",
    "deepseek-v3",
    "gpt-oss-20b",
    "llama4-scout",
    "qwen3-next-80b-a3b",
    "nemotron-h-8b",
    "olmo2-32b",
    "olmoe-1b-7b",
)
AXES: dict[str, tuple[dict[str, Any], ...]] = {
    "microbatches": ({}, {"microbatch": 2}),
    "recompute": ({"recompute": "full"},),
    "tp": ({"tp": 2}, {"tp": 2, "sequence_parallel": True}, {"tp": 4, "sequence_parallel": True}),
    "cp": tuple({"cp": 2, "cp_kind": kind} for kind in ("ring", "allgather", "ulysses")),
    "pp": (
        {"pp": 2},
        {"pp": 2, "schedule": "zb-h1"},
        {"pp": 2, "schedule": "interleaved", "virtual_stages": 2},
        {"pp": 2, "schedule": "zb-v", "virtual_stages": 2},
    ),
    "dp": ({"dp": 2}, {"dp": 2, "zero": 2}, {"dp": 4, "zero": 3}),
    "ep": ({"dp": 2, "ep": 2}, {"dp": 4, "ep": 2, "expert_tp": 2}),
}


def cases(precision: str) -> Iterator[tuple[str, str, Asked, Layout]]:
    """Yield every axis under every model that has it, with the small model."""
    for name in MODELS:
        for axis, layouts in AXES.items():
            for fields in layouts:
                layout = Layout(precision=precision, **fields)  # type: ignore[arg-type]
                model = catalog.model(name)
                if problems_of(model, layout, sequence=32, sequences=8):
                    continue
                small = shrink(model, [layout], sequence=32, multiple=multiple_of(precision))
                asked = Asked(small.model, 8, 32, 0, updates_for(small.model))
                yield axis, f"{name} {fields}", asked, small.layouts[0]


def on_ranks(told: bytes) -> list[list[Deviation]]:
    """Run cases of one world size on this rank."""
    import torch.distributed as dist

    found = []
    for asked, layout, base in pickle.loads(told):
        mine = run_step(asked, layout)
        found.append(deviations(asked.model, layout, dist.get_rank(), mine, base))
    return found


def size_of(one: Deviation, asked: Asked, precision: str) -> float:
    """Return an error, in 16 bits as a multiple of one device's."""
    if precision == "fp32":
        return one.error
    rows = rows_of(asked.model, one.kind, one.name, asked.sequences * asked.length)
    if one.error <= sent_elsewhere(one.kind, precision, rows):
        return 0.0
    return one.error / max(one.alone, ROUNDING[precision])


def main(precision: str) -> None:
    """Print the tables."""
    by_ranks: dict[int, list[tuple[str, str, Asked, Layout]]] = {}
    for case in cases(precision):
        by_ranks.setdefault(case[3].gpus, []).append(case)
    known: dict[object, Baseline] = {}
    worst: dict[tuple[str, str], tuple[float, str, Deviation]] = {}
    for ranks, every in by_ranks.items():
        told, some = [], []
        for case in every:
            _, name, asked, layout = case
            if asked.model not in known:
                try:
                    known[asked.model] = baseline(asked, precision)  # type: ignore[arg-type]
                except InputError as error:
                    print(f"left out: {name}: {error}")
                    continue
            told.append((asked, layout, known[asked.model]))
            some.append(case)
        by_rank = launch(ranks, on_ranks, pickle.dumps(told), timeout_s=900)
        for number, (axis, name, asked, _) in enumerate(some):
            for one in (each for lists in by_rank for each in lists[number]):
                size, key = size_of(one, asked, precision), (axis, one.kind)
                if key not in worst or not size <= worst[key][0]:
                    worst[key] = (size, name, one)
    for axis in AXES:
        for kind in KINDS:
            if (axis, kind) in worst:
                size, name, one = worst[axis, kind]
                print(f"{axis:13} {kind:11} {size:9.2e}  {one.name}, rank {one.rank}, {name}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fp32")
