"""Clocks are aligned by the ends of shared collectives, and left alone where they agree."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from meshwright.observe.analyze.collectives.clock_alignment import align_timeline, estimate_clocks
from meshwright.observe.analyze.collectives.matched_collectives import match_collectives
from meshwright.timeline.readers.kineto.kineto_reader import read_kineto
from meshwright.timeline.timeline import Timeline
from tests.observe.analyze.jobs import collective, steady_job, timeline_of


def test_one_clock_is_found_to_be_shared() -> None:
    job = steady_job(jitter_us=20)
    found = estimate_clocks(match_collectives(job))
    assert found.is_shared
    assert align_timeline(job, found) is job


def test_an_offset_is_found_within_the_spread_of_ends() -> None:
    job = steady_job(steps=20, jitter_us=10, clock_us={2: lambda t: t + 4321.0})
    found = estimate_clocks(match_collectives(job))
    assert not found.is_shared
    assert found.clocks[2].offset_ns == pytest.approx(4_321_000, abs=10_000)
    assert abs(found.clocks[1].offset_ns) < 10_000


@pytest.mark.parametrize(("transfer_us", "offset_us"), [(100, 60), (10_000, 3_000)])
def test_an_offset_shorter_than_the_collectives_is_found(
    transfer_us: float, offset_us: float
) -> None:
    clock = {1: lambda t: t + offset_us}
    job = steady_job(steps=20, jitter_us=5, transfer_us=lambda _step: transfer_us, clock_us=clock)
    found = estimate_clocks(match_collectives(job))
    assert not found.is_shared
    assert found.clocks[1].offset_ns == pytest.approx(1_000 * offset_us, abs=5_000)
    assert found.clocks[1].uncertainty_ns < 1_000 * offset_us


def test_short_collectives_tell_what_long_ones_cannot() -> None:
    rows = []
    for n in range(400):
        at = 20_000.0 * n
        for rank in range(2):
            clock = 90.0 * rank
            # Long ones end 300 µs apart on one clock, as their last messages travel.
            late = 300.0 * rank if n % 40 else 0.0
            size, took = (10**9, 10_000.0) if n % 40 else (8, 30.0)
            rows.append(collective(rank, at + clock, at + took + clock + late, bytes=size))
    found = estimate_clocks(match_collectives(timeline_of(rows)))
    assert not found.is_shared
    assert found.clocks[1].offset_ns == pytest.approx(90_000, abs=1_000)


def test_a_root_that_is_done_early_has_no_clock_of_its_own() -> None:
    sent = {"collective": "broadcast", "name": "ncclDevKernel_Broadcast_RING_LL"}
    rows = [
        collective(rank, 1000.0 * n, 1000.0 * n + (100 if rank == 0 else 180), **sent)
        for n in range(20)
        for rank in range(4)
    ]
    assert estimate_clocks(match_collectives(timeline_of(rows))).is_shared


def test_a_drift_is_found_where_it_shows() -> None:
    job = steady_job(steps=300, jitter_us=5, clock_us={1: lambda t: t * (1 + 50e-6) + 700.0})
    found = estimate_clocks(match_collectives(job))
    assert found.clocks[1].drift == pytest.approx(50e-6, rel=0.1)
    moved, right = align_timeline(job, found), steady_job(steps=300, jitter_us=5)
    assert np.abs(moved.column("start_ns") - right.column("start_ns")).max() < 8_000


def test_ranks_without_a_common_collective_are_reached_through_others() -> None:
    rows = []
    for n in range(10):
        at = 1000.0 * n
        for group, ranks in (("a", (0, 1)), ("b", (1, 2))):
            for rank in ranks:
                late = at + (500 if group == "b" else 0) + 50_000 * rank
                extra = json.dumps({"Process Group Name": group, "Seq": n})
                rows.append(collective(rank, late, late + 100, group=group, extra=extra))
    found = estimate_clocks(match_collectives(timeline_of(rows)))
    assert [one.offset_ns for one in found.clocks] == [0, 50_000_000, 100_000_000]
    assert all(one.is_aligned for one in found.clocks)


def test_real_ranks_on_one_host_share_a_clock_and_planted_offsets_are_found(shared: Path) -> None:
    folder = shared / "traces" / "modded-nanogpt" / "8rank-h100-2025-12-11"
    job = Timeline.concat(read_kineto(folder / f"rank-{rank}.json.gz") for rank in range(8))
    assert estimate_clocks(match_collectives(job)).is_shared
    offset = np.array([0, 3, -2, 4, -5, 1, 2, -3]) * 1_000_000
    start = job.column("start_ns")
    place = job.spans.column_names.index("start_ns")
    moved = msgspec.structs.replace(
        job,
        spans=job.spans.set_column(
            place, job.spans.schema.field(place), pa.array(start + offset[job.column("rank")])
        ),
    )
    found = estimate_clocks(match_collectives(moved))
    assert not found.is_shared
    for one in found.clocks:
        assert one.offset_ns == pytest.approx(offset[one.rank], abs=15_000)
    assert np.abs(align_timeline(moved, found).column("start_ns") - start).max() < 15_000
