"""What the ranks of the tests do: many cases in one start, each checked on the spot."""

import itertools
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshwright.errors import InputError
from meshwright.policy.collective import ALGORITHMS, build_algorithm, verify_collective
from meshwright.policy.collective.collective import (
    PARTITIONED_OPS,
    REDUCING_OPS,
    Collective,
    CollectiveOp,
)
from meshwright.run.parallel.collective import CollectiveExecutor, RankCommunicator
from meshwright.run.parallel.collective.bench.test_data import make_full_message, make_input_data
from meshwright.run.parallel.collective.bench.torch_native import run_torch_collective
from meshwright.run.parallel.collective.chunk_layout import ChunkLayout
from meshwright.run.parallel.collective.communicator import Transport

DTYPES = (torch.float32, torch.bfloat16, torch.int64)
MORE_DTYPES = (torch.float16, torch.float64, torch.int32)


class Verdict(NamedTuple):
    """What came of one case on one rank."""

    case: str
    fault: str
    """What was wrong; empty where all was right."""


def library(ranks: int, op: CollectiveOp) -> Iterator[Collective]:
    """Return every algorithm of the library that fits so many ranks, two channels among them."""
    chance = random.Random(ranks)
    counts = [[chance.randrange(4) for _ in range(ranks)] for _ in range(ranks)]
    for algorithm in ALGORITHMS:
        if op not in algorithm.ops:
            continue
        for channels in (1, 2):
            try:
                yield build_algorithm(
                    algorithm.name,
                    op,
                    ranks,
                    per_node=2,
                    nodes_per_pod=2,
                    channels=channels,
                    root=ranks - 1,
                    counts=counts if op == "all_to_all_v" else None,
                    peers=[(rank + 1) % ranks for rank in range(ranks)]
                    if op == "send_recv"
                    else None,
                )
            except InputError:
                continue  # not for this rank count


def compare_with_native(
    ops: Sequence[CollectiveOp],
    sizes: Sequence[int],
    dtypes: Sequence[torch.dtype],
    transport: Transport,
) -> list[Verdict]:
    """Run every algorithm in and out of place; compare bit by bit with torch's own."""
    warnings.simplefilter("ignore")  # gloo warns about how it does what it has no call for
    team = RankCommunicator(transport=transport, timeout_s=20.0, frame_bytes=4096)
    found: list[Verdict] = []
    for op in ops:
        references: dict[tuple[int, torch.dtype], torch.Tensor | None] = {}
        for collective in library(team.ranks, op):
            executor = CollectiveExecutor(collective, team)
            for elements, dtype in itertools.product(_elements(collective, sizes), dtypes):
                if (elements, dtype) not in references:
                    references[elements, dtype] = _native(collective, team, elements, dtype)
                found += _one(executor, elements, dtype, references[elements, dtype])
    return found


def _elements(collective: Collective, sizes: Sequence[int]) -> list[int]:
    """Return sizes that the operation allows: equal parts for all ranks where it has parts."""
    parts = 10 if collective.op == "all_to_all_v" else 1
    ranks = collective.ranks if collective.op in PARTITIONED_OPS else 1
    return [max(1, size // parts // ranks) * ranks for size in sizes]


def _native(
    collective: Collective, team: RankCommunicator, elements: int, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return what torch's own operation gives this rank."""
    cuts = ChunkLayout(collective, elements)
    wanted = cuts.get_tensor_sizes(team.rank).output_elements
    right = None if wanted is None else torch.empty(wanted, dtype=dtype)
    mine = make_input_data(collective, team.rank, cuts, dtype)
    run_torch_collective(collective, team.group, mine, right, elements=elements)
    return right


def _one(
    executor: CollectiveExecutor, elements: int, dtype: torch.dtype, right: torch.Tensor | None
) -> Iterator[Verdict]:
    collective, rank = executor.collective, executor.team.rank
    mine = make_input_data(collective, rank, ChunkLayout(collective, elements), dtype)
    case = f"{collective.name} {collective.op} ×{collective.channels} {elements} {dtype}"

    before = None if mine is None else mine.clone()
    # A rank that gives nothing shows by its `out` how large the message is.
    out = torch.empty_like(right) if mine is None and right is not None else None
    result = executor.run(mine, out, chunk_elements=elements)
    yield Verdict(f"{case}, out of place", _differs(result, right))
    if mine is not None and before is not None and not torch.equal(mine, before):
        yield Verdict(case, "the input was overwritten")
    if collective.op != "all_to_all_v":  # whose input and output differ in size
        whole = make_full_message(collective, rank, elements, dtype)
        yield Verdict(f"{case}, in place", _differs(executor.run_in_place(whole), right))


def _differs(result: torch.Tensor | None, right: torch.Tensor | None) -> str:
    if result is None or right is None:
        return "" if result is right else "a result where none was wanted, or none"
    if torch.equal(result, right):
        return ""
    wrong = torch.nonzero(result != right).flatten().tolist()
    return f"{len(wrong)} of {right.numel()} elements differ, the first at {wrong[0]}"


def add_random_numbers(transport: Transport) -> list[Verdict]:
    """Add numbers whose sum depends on the order: near the right one, and the same everywhere."""
    team = RankCommunicator(transport=transport, timeout_s=20.0, frame_bytes=4096)
    torch.manual_seed(team.rank)
    found = []
    for collective in library(team.ranks, "all_reduce"):
        mine = torch.randn(5000)
        right = mine.double()
        dist.all_reduce(right)
        result = CollectiveExecutor(collective, team).run(mine)
        assert result is not None
        near = torch.allclose(result.double(), right, rtol=1e-5, atol=1e-5)
        everyone = [torch.empty_like(result) for _ in range(team.ranks)]
        dist.all_gather(everyone, result)
        same = all(torch.equal(one, result) for one in everyone)
        promised = verify_collective(collective).same_on_all_ranks
        found.append(Verdict(f"{collective.name} is near", "" if near else "it is not"))
        if promised:
            found.append(Verdict(f"{collective.name} is the same", "" if same else "it is not"))
    return found


def reduce_otherwise(transport: Transport) -> list[Verdict]:
    """Take averages, largest and smallest values."""
    team = RankCommunicator(transport=transport, timeout_s=20.0)
    found = []
    for op in sorted(REDUCING_OPS):
        collective = build_algorithm("ring", op, team.ranks)  # type: ignore[arg-type]
        size = 12 * team.ranks
        columns = torch.stack(
            [make_full_message(collective, r, size, torch.float32) for r in range(team.ranks)]
        )
        whole = {"avg": columns.mean(0), "max": columns.amax(0), "min": columns.amin(0)}
        for how, right in whole.items():
            executor = CollectiveExecutor(collective, team, reduce=how)  # type: ignore[arg-type]
            result = executor.run(columns[team.rank].clone())
            wanted: Any = right
            if op == "reduce_scatter":
                wanted = right.chunk(team.ranks)[team.rank]
            if op == "reduce" and team.rank != collective.root:
                wanted = None
            found.append(Verdict(f"{how} by {op}", _differs(result, wanted)))
    return found
