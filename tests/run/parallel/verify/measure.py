"""Measures what the tolerances of `verify` are made of; run it as a module, it takes minutes.

    python -m tests.run.parallel.verify.measure [fp32|bf16|fp16|fp8-…]

Every axis alone, under a model of each kind in the catalog, shrunk. Prints for each axis and kind
of tensor the largest error, where it was, and in 16-bit formats as a multiple of one device's.
"""

import pickle
import sys
from collections.abc import Iterator
from typing import Any

from meshwright.cli.parity.command import make_optimizer_factory
from meshwright.errors import InputError
from meshwright.run.parallel.compatibility import find_verify_problems
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.verify.deviation import (
    BaselineStep,
    Deviation,
    count_expert_rows,
    list_deviations,
)
from meshwright.run.parallel.verify.layout_verification import get_width_multiple, run_baseline
from meshwright.run.parallel.verify.shrunk_model import shrink_model
from meshwright.run.parallel.verify.tolerances import (
    ROUNDING_ERRORS,
    TENSOR_KINDS,
    compute_rerouting_error,
)
from meshwright.run.parallel.verify.verification_step import VerifyCase, run_verify_step
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


def cases(precision: str) -> Iterator[tuple[str, str, VerifyCase, Layout]]:
    """Yield every axis under every model that has it, with the small model."""
    for name in MODELS:
        for axis, layouts in AXES.items():
            for fields in layouts:
                layout = Layout(precision=precision, **fields)  # type: ignore[arg-type]
                model = catalog.get_model(name)
                if find_verify_problems(model, layout, sequence_length=32, global_batch=8):
                    continue
                small = shrink_model(
                    model, [layout], sequence_length=32, multiple=get_width_multiple(precision)
                )
                asked = VerifyCase(small.model, 8, 32, 0, make_optimizer_factory(small.model))
                yield axis, f"{name} {fields}", asked, small.layouts[0]


def on_ranks(told: bytes) -> list[list[Deviation]]:
    """Run cases of one world size on this rank."""
    import torch.distributed as dist

    found = []
    for asked, layout, base in pickle.loads(told):
        mine = run_verify_step(asked, layout)
        found.append(list_deviations(asked.model, layout, dist.get_rank(), mine, base))
    return found


def size_of(one: Deviation, asked: VerifyCase, precision: str) -> float:
    """Return an error, in 16 bits as a multiple of one device's."""
    if precision == "fp32":
        return one.error
    rows = count_expert_rows(
        asked.model, one.kind, one.name, asked.global_batch * asked.sequence_length
    )
    if one.error <= compute_rerouting_error(one.kind, precision, rows):
        return 0.0
    return one.error / max(one.baseline_error, ROUNDING_ERRORS[precision])


def main(precision: str) -> None:
    """Print the tables."""
    by_ranks: dict[int, list[tuple[str, str, VerifyCase, Layout]]] = {}
    for case in cases(precision):
        by_ranks.setdefault(case[3].gpus, []).append(case)
    known: dict[object, BaselineStep] = {}
    worst: dict[tuple[str, str], tuple[float, str, Deviation]] = {}
    for ranks, every in by_ranks.items():
        told, some = [], []
        for case in every:
            _, name, asked, layout = case
            if asked.model not in known:
                try:
                    known[asked.model] = run_baseline(asked, precision)  # type: ignore[arg-type]
                except InputError as error:
                    print(f"left out: {name}: {error}")
                    continue
            told.append((asked, layout, known[asked.model]))
            some.append(case)
        by_rank = spawn_ranks(ranks, on_ranks, pickle.dumps(told), timeout_s=900)
        for number, (axis, name, asked, _) in enumerate(some):
            for one in (each for lists in by_rank for each in lists[number]):
                size, key = size_of(one, asked, precision), (axis, one.kind)
                if key not in worst or not size <= worst[key][0]:
                    worst[key] = (size, name, one)
    for axis in AXES:
        for kind in TENSOR_KINDS:
            if (axis, kind) in worst:
                size, name, one = worst[axis, kind]
                print(f"{axis:13} {kind:11} {size:9.2e}  {one.name}, rank {one.rank}, {name}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "fp32")
