"""Proves collectives of 4,096 ranks, and simulates all-reduces over 1,024 GPUs."""

import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context

from meshwright.policy.collective import build_algorithm, verify_collective
from meshwright.policy.collective.collective import CollectiveOp
from meshwright.predict.collective import predict_nccl, simulate_collective
from meshwright.spec.catalog import get_cluster

NAME = "collective_proof"
QUESTION = "How long do the proof of 4,096 ranks and the simulation of 1,024 GPUs take?"

PROOFS: tuple[tuple[str, CollectiveOp, int | None], ...] = (
    ("ring", "all_reduce", None),
    ("double_tree", "all_reduce", None),
    ("halving_doubling", "all_reduce", None),
    ("two_level", "all_reduce", 8),
    ("pat", "reduce_scatter", None),
    ("pairwise", "all_to_all", None),
    ("cross_forward", "all_to_all", 8),
)
RUNS = (("ring", 8), ("double_tree", 8), ("two_level", 1))
SIZES_MIB = (1, 64, 1024)


def measure(quick: bool) -> dict[str, object]:
    """Time each proof in a process of its own, and each simulation three times."""
    ranks, gpus = (64, 64) if quick else (4096, 1024)
    figures: list[dict[str, object]] = []
    for name, op, per_node in PROOFS:
        with get_context("spawn").Pool(1) as pool:
            seconds, peak_bytes = pool.apply(_proof, (name, op, per_node, ranks))
        what = f"proof of {name} {op}, {ranks} ranks"
        figures += [
            {"name": what, "value": seconds, "unit": "s", "target": "< 15"},
            {"name": f"{what}, peak memory", "value": peak_bytes / 2**30, "unit": "GiB"},
        ]
    nodes = get_cluster("h100-superpod").with_gpus(gpus)
    for mib in SIZES_MIB:
        for name, channels in RUNS:
            made = build_algorithm(name, "all_reduce", gpus, per_node=8, channels=channels)
            seconds = _median(partial(simulate_collective, made, nodes, mib << 20))
            what = f"simulation of {name}, {channels} channels, {gpus} GPUs, {mib} MiB"
            figures.append({"name": what, "value": seconds, "unit": "s", "target": "< 1"})
        seconds = _once(partial(predict_nccl, nodes, "all_reduce", mib << 20))
        what = f"simulation of NCCL's choice, {gpus} GPUs, {mib} MiB"
        figures.append({"name": what, "value": seconds, "unit": "s", "target": "< 1"})
    notes = "Wall times; proofs once each in a fresh process, simulations the median of three; "
    notes += "NCCL's choice once, since what is built for it is kept."
    return {"figures": figures, "peers": [], "notes": notes}


def _proof(name: str, op: CollectiveOp, per_node: int | None, ranks: int) -> tuple[float, int]:
    made = build_algorithm(name, op, ranks, per_node=per_node)
    start = time.perf_counter()
    proof = verify_collective(made)
    seconds = time.perf_counter() - start
    if not proof.is_correct:
        raise AssertionError(proof.problems)
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _median(run: Callable[[], object]) -> float:
    return statistics.median(_once(run) for _ in range(3))


def _once(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
