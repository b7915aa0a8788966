"""HTA 0.5's printed figures on 64 ranks, made of the 8-rank set as they were made for HTA.

Each rank is one of the eight with its number and its world's size changed and all its times later
by some microseconds. They are made, read and dropped one after another.
"""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.observe.analyze.hta.hta_device_time import (
    get_comm_comp_overlap,
    get_kernel_types,
    get_temporal_breakdown,
)
from meshwright.observe.analyze.hta.hta_frame import HtaFrame, build_frames
from meshwright.timeline.readers.kineto.kineto_reader import read_kineto

pytestmark = [pytest.mark.real, pytest.mark.slow]

RANKS = 64


def frame_of(document: dict[str, Any], rank: int, path: Path) -> HtaFrame:
    """One of the eight as rank so and so of 64."""
    later_us = (rank * 37) % 101
    info = {**document.get("distributedInfo", {}), "rank": rank, "world_size": RANKS}
    events = [
        {**event, "ts": event["ts"] + later_us}
        if event.get("ph") != "M" and isinstance(event.get("ts"), int | float)
        else event
        for event in document["traceEvents"]
    ]
    path.write_text(json.dumps({**document, "distributedInfo": info, "traceEvents": events}))
    (found,) = build_frames(read_kineto(path, detail="full"))
    return found


@pytest.fixture(scope="module")
def printed(shared: Path) -> dict[str, Any]:
    text = (shared / "validation" / "hta_figures_dev.json").read_text(encoding="utf-8")
    figures: dict[str, Any] = json.loads(text)["sets"]["syn_nano64"]["figures"]
    return figures


@pytest.fixture(scope="module")
def ours(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> list[HtaFrame]:
    folder = shared / "traces" / "modded-nanogpt" / "8rank-h100-2025-12-11"
    made = tmp_path_factory.mktemp("ranks") / "rank.json"
    found: dict[int, HtaFrame] = {}
    for number in range(8):
        with gzip.open(folder / f"rank-{number}.json.gz") as file:
            document = json.load(file)
        for rank in range(number, RANKS, 8):
            found[rank] = frame_of(document, rank, made)
    return [found[rank] for rank in range(RANKS)]


def test_temporal_breakdown(ours: list[HtaFrame], printed: dict[str, Any]) -> None:
    for frame, theirs in zip(ours, printed["temporal_breakdown"], strict=True):
        found = get_temporal_breakdown(frame)
        assert (found.rank, found.kernel_us) == (theirs["rank"], theirs["kernel_time(us)"])
        for name in ("idle", "compute", "non_compute"):
            part = getattr(found, f"{name}_us")
            assert part == pytest.approx(theirs[f"{name}_time(us)"], abs=1)
            assert found.percent(part) == pytest.approx(theirs[f"{name}_time_pctg"], abs=0.0101)


def test_overlap(ours: list[HtaFrame], printed: dict[str, Any]) -> None:
    for frame, theirs in zip(ours, printed["comm_comp_overlap"], strict=True):
        assert get_comm_comp_overlap(frame) == pytest.approx(
            theirs["comp_comm_overlap_pctg"], abs=0.0101
        )


def test_kernel_types(ours: list[HtaFrame], printed: dict[str, Any]) -> None:
    found = {row.kernel_type: row for row in get_kernel_types(tuple(ours)) if row.sum_us}
    theirs = {row["kernel_type"]: row for row in printed["kernel_type"] if row["sum"]}
    assert set(found) == set(theirs)
    for name, row in found.items():
        # One microsecond for each rank: HTA's own sum moves so much with the processor.
        assert row.sum_us == pytest.approx(theirs[name]["sum"], abs=RANKS)
        assert row.percent == pytest.approx(theirs[name]["percentage"], abs=0.101)
