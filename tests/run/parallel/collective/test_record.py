"""Measured collectives leave the same kind of record as simulated ones."""

from pathlib import Path

import torch

from meshwright.policy.collective import build
from meshwright.run.parallel.collective import Executor, Team
from meshwright.run.parallel.collective.launch import launch
from meshwright.run.parallel.collective.team import Transport
from meshwright.timeline import TimelineWriter, read


def recorded(folder: Path, transport: Transport) -> None:
    team = Team(transport=transport, patience_s=10.0)
    ring = build("ring", "all_reduce", team.ranks)
    with TimelineWriter(folder, rank=team.rank) as timeline:
        Executor(ring, team, timeline=timeline).run_in_place(torch.zeros(3000))


def test_every_frame_is_a_span_on_the_lane_of_its_link(tmp_path: Path) -> None:
    for transport in ("shared", "torch"):
        launch(3, recorded, tmp_path / transport, transport, timeout_s=60)
        spans = read(tmp_path / transport).spans
        lanes = {str(lane) for lane in spans["lane"]}
        assert lanes >= {"send to 1, channel 0", "receive from 2, channel 0"}
        assert len(spans["rank"]) == 3 * 2 * 4  # ranks, both ways, 2(n − 1) steps
        sent = sorted(flow for flow in spans["flow_out"].to_pylist() if flow is not None)
        taken = sorted(flow for flow in spans["flow_in"].to_pylist() if flow is not None)
        assert sent == taken, "every send is tied to the receive of the same frame"
