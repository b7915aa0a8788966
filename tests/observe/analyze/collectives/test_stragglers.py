"""The rank that holds up the others is named, with why: planted causes and a real job."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from meshwright.observe.analyze.collectives.stragglers import find_stragglers
from meshwright.observe.analyze.critical_path import build_window_graph
from meshwright.observe.analyze.critical_path.dependency_graph import NodeKind
from meshwright.observe.analyze.critical_path.graph_timing import compute_graph_times
from meshwright.timeline.readers.kineto.kineto_reader import read_kineto
from meshwright.timeline.timeline import Timeline
from tests.observe.analyze.jobs import collective, steady_job, timeline_of


def test_ranks_in_step_have_no_straggler() -> None:
    found = find_stragglers(steady_job(jitter_us=2))
    assert (found.pattern, found.single_straggler) == ("none", None)


def test_slow_kernels_are_told_from_a_late_host() -> None:
    slow = find_stragglers(
        steady_job(compute_us=lambda rank, _step: 1200.0 if rank == 2 else 900.0)
    )
    assert (slow.pattern, slow.single_straggler, slow.ranks[0].cause) == ("one rank", 2, "compute")
    late = find_stragglers(steady_job(pause_us=lambda rank, _step: 300.0 if rank == 1 else 0.0))
    assert (late.pattern, late.single_straggler, late.ranks[0].cause) == ("one rank", 1, "host")


def test_a_wait_for_data_is_told_from_a_late_host() -> None:
    job = steady_job(
        pause_us=lambda rank, _step: 300.0 if rank == 3 else 0.0,
        pause_name="enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
    )
    found = find_stragglers(job)
    assert (found.single_straggler, found.ranks[0].cause) == (3, "data")


def test_what_a_straggler_costs_is_counted_by_hand() -> None:
    found = find_stragglers(
        steady_job(ranks=4, steps=5, compute_us=lambda rank, _step: 1000.0 if rank == 0 else 900.0)
    )
    worst = found.ranks[0]
    assert worst.rank == 0
    assert worst.avoidable_wait_ns == 5 * 100_000
    assert worst.caused_wait_ns == 5 * 3 * 100_000
    assert worst.wait_ns == 0
    assert worst.extra_compute_ns == 4 * 100_000  # Nothing is known before the first collective.


def test_turns_are_told_from_one_rank() -> None:
    job = steady_job(compute_us=lambda rank, step: 1200.0 if rank == step % 4 else 900.0)
    found = find_stragglers(job)
    assert (found.pattern, found.single_straggler) == ("rotating", None)
    assert [one.rank for one in found.step_stragglers] == [0, 1, 2, 3, 0, 1, 2, 3]


@pytest.mark.parametrize("late", [(3, 5), (0, 1, 2), (4, 5, 6, 7)])
def test_ranks_that_are_late_together_are_named_together(late: tuple[int, ...]) -> None:
    job = steady_job(
        ranks=8,
        compute_us=lambda rank, step: (1200.0 if rank in late else 900.0) + (3 * rank + step) % 5,
    )
    found = find_stragglers(job)
    assert (found.pattern, found.straggler_ranks, found.single_straggler) == (
        "some ranks",
        late,
        None,
    )
    assert {one.rank: one.cause for one in found.ranks[: len(late)]} == dict.fromkeys(
        late, "compute"
    )
    assert found.ranks[0].avoidable_wait_with_group_ns == pytest.approx(8 * 300_000, rel=0.05)


def test_a_slow_node_is_named_by_groups_that_cross_nodes() -> None:
    rows = []
    for step in range(10):
        for rank in range(8):
            start = 2000.0 * step + (300 if rank >= 4 else 0) + (3 * rank + step) % 5
            pair = [rank % 4, rank % 4 + 4]
            extra = json.dumps({"Process Group Ranks": str(pair)})
            rows.append({"rank": rank, "start": 2000.0 * step, "end": start, "name": "gemm"})
            end = 2000.0 * step + 500
            rows.append(collective(rank, start, end, group=f"dp {rank % 4}", extra=extra))
    found = find_stragglers(timeline_of(rows))
    assert (found.pattern, found.straggler_ranks) == ("some ranks", (4, 5, 6, 7))


def test_a_few_bad_steps_are_told_from_a_bad_rank() -> None:
    job = steady_job(
        steps=20, compute_us=lambda rank, step: 9000.0 if (rank, step) == (2, 7) else 900.0
    )
    found = find_stragglers(job)
    assert (found.pattern, found.single_straggler) == ("few steps", 2)
    worst = max(found.step_stragglers, key=lambda one: one.avoidable_wait_ns)
    assert (worst.step, worst.rank) == (7, 2)


def test_a_slow_link_is_found_by_the_groups_that_share_it() -> None:
    rows = []
    pairs = [(0, 1), (2, 3), (0, 2), (1, 3), (0, 3), (1, 2)]
    for n in range(6):
        for number, ranks in enumerate(pairs):
            at = 10_000.0 * n + 1000 * number
            took = 300.0 if 3 in ranks else 100.0
            for rank in ranks:
                extra = json.dumps(
                    {"Process Group Name": str(number), "Process Group Ranks": str(list(ranks))}
                )
                rows.append(collective(rank, at, at + took, group=str(number), extra=extra))
    found = find_stragglers(timeline_of(rows))
    assert [one.ranks for one in found.slow_links] == [(3,)]
    assert found.slow_links[0].slowdown > 1.25


def test_rank_one_of_the_real_job_is_named_with_a_late_host(shared: Path) -> None:
    folder = shared / "traces" / "modded-nanogpt" / "8rank-h100-2025-12-11"
    job = Timeline.concat(read_kineto(folder / f"rank-{rank}.json.gz") for rank in range(8))
    found = find_stragglers(job)
    assert found.single_straggler == 1
    assert found.ranks[0].cause == "host"
    assert found.ranks[0].avoidable_wait_ns > 4 * found.ranks[1].avoidable_wait_ns
    assert found.ranks[0].wait_ns == min(one.wait_ns for one in found.ranks)


@pytest.mark.parametrize("factor", [1.3, 2.0])
def test_slow_kernels_planted_in_a_real_job_are_found(shared: Path, factor: float) -> None:
    folder = shared / "traces" / "modded-nanogpt" / "8rank-h100-2025-12-11"
    job = Timeline.concat(read_kineto(folder / f"rank-{rank}.json.gz") for rank in (3, 4, 5, 6))
    assert find_stragglers(job).pattern == "none"
    found = find_stragglers(slowed(job, 5, factor))
    assert (found.single_straggler, found.ranks[0].cause) == (5, "compute")


def slowed(job: Timeline, rank: int, factor: float) -> Timeline:
    """Return the job with one rank's kernels longer, all that depends on them moved along."""
    graph = (built := build_window_graph(job, dict.fromkeys(job.ranks, job.extent_ns))).graph
    kinds = built.rank_timelines[rank].string_column("kind")
    computes = np.array([value == "compute" for value in kinds.values])[kinds.codes]
    longer = (graph.rank == rank) & (graph.kind == NodeKind.DEVICE_WORK)
    longer[longer] = computes[graph.row[longer]]
    result = compute_graph_times(
        graph, np.where(longer, graph.duration_ns * factor, graph.duration_ns).astype(np.int64)
    )
    parts = []
    for number, part in built.rank_timelines.items():
        start = part.column("start_ns").copy()
        end = start + part.column("duration_ns")
        for kinds_of, values, moments in (
            ((NodeKind.DEVICE_WORK, NodeKind.COLLECTIVE_START), start, result.start),
            ((NodeKind.DEVICE_WORK, NodeKind.COLLECTIVE_END), end, result.end),
        ):
            own = np.flatnonzero((graph.rank == number) & np.isin(graph.kind, kinds_of))
            values[graph.row[own]] = moments[own]
        spans = part.spans
        for name, values in (("start_ns", start), ("duration_ns", end - start)):
            place = spans.column_names.index(name)
            spans = spans.set_column(place, spans.schema.field(place), pa.array(values))
        parts.append(msgspec.structs.replace(part, spans=spans))
    return Timeline.concat(parts)
