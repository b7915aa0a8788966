"""Measured collectives leave the same kind of record as simulated ones."""

from pathlib import Path

import pytest
import torch

from meshwright.policy.collective import Collective, build_algorithm
from meshwright.predict.collective import simulate_collective
from meshwright.run.parallel.collective import CollectiveExecutor, RankCommunicator
from meshwright.run.parallel.collective.communicator import Transport
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.spec.catalog import get_cluster
from meshwright.timeline import Timeline, TimelineWriter, read_timeline

SPAN = ("rank", "lane", "name", "kind", "collective", "group", "extra")


def recorded(folder: Path, transport: Transport) -> None:
    team = RankCommunicator(transport=transport, timeout_s=10.0)
    ring = build_algorithm("ring", "all_reduce", team.ranks)
    with TimelineWriter(folder, rank=team.rank) as timeline:
        CollectiveExecutor(ring, team, timeline=timeline).run_in_place(torch.zeros(3000))


def test_every_frame_is_a_span_on_the_lane_of_its_link(tmp_path: Path) -> None:
    for transport in ("shm", "torch"):
        spawn_ranks(3, recorded, tmp_path / transport, transport, timeout_s=60)
        spans = read_timeline(tmp_path / transport).spans
        lanes = {str(lane) for lane in spans["lane"]}
        assert lanes >= {"send to 1, channel 0", "receive from 2, channel 0"}
        assert len(spans["rank"]) == 3 * 2 * 4  # ranks, both ways, 2(n − 1) steps
        sent = sorted(flow for flow in spans["flow_out"].to_pylist() if flow is not None)
        taken = sorted(flow for flow in spans["flow_in"].to_pylist() if flow is not None)
        assert sent == taken, "every send is tied to the receive of the same frame"


def once(folder: Path, collective: Collective) -> None:
    team = RankCommunicator(transport="shm", timeout_s=10.0)
    with TimelineWriter(folder, rank=team.rank) as timeline:
        CollectiveExecutor(collective, team, timeline=timeline).run(torch.zeros(3000))


def spans_of(timeline: Timeline) -> set[tuple[object, ...]]:
    return set(zip(*(timeline.spans[column].to_pylist() for column in SPAN), strict=True))


@pytest.mark.parametrize(
    "collective",
    [
        build_algorithm("ring", "all_reduce", 2, channels=2),
        build_algorithm("pairwise", "all_to_all", 2),
    ],
    ids=lambda one: one.op,
)
def test_simulated_and_measured_spans_are_named_alike(
    tmp_path: Path, collective: Collective
) -> None:
    spawn_ranks(2, once, tmp_path, collective, timeout_s=60)
    system = get_cluster("h100-superpod").with_gpus(2)
    simulated = simulate_collective(collective, system, 12_000, keep_moves=True).build_timeline()
    assert spans_of(read_timeline(tmp_path)) == spans_of(simulated)
