"""The page of a twin draws every pass of both steps and needs nothing from outside."""

import re

from meshwright.cli.twin.page import draw_comparison, draw_phase_bars
from meshwright.observe.twin.step_comparison import compare_steps
from meshwright.timeline import Timeline

PASSES: tuple[tuple[int, str, float, float], ...] = (
    (0, "forward", 0.0, 1.0),
    (1, "forward", 1.0, 2.0),
    (1, "backward", 2.0, 4.0),
    (0, "backward", 4.0, 6.0),
)


def step(stretch: float, step_s: float) -> Timeline:
    rank, name, start, end = zip(*PASSES, strict=True)
    return Timeline.from_columns(
        {
            "rank": list(rank),
            "process": "host",
            "lane": "forward-backward",
            "kind": "host",
            "name": list(name),
            "stage": list(rank),
            "microbatch": 0,
            "start_ns": [round(stretch * one * 1e9) for one in start],
            "duration_ns": [
                round(stretch * (b - a) * 1e9) for a, b in zip(start, end, strict=True)
            ],
            "extra": [f'{{"chunk":{one},"layers":[0,1]}}' for one in rank],
        },
        source="simulated",
        metadata={"step_s": repr(step_s)},
    )


PREDICTED, MEASURED = step(1.0, 7.0), step(2.0, 14.0)
FOUND = compare_steps(PREDICTED, MEASURED)


def test_every_pass_of_both_sides_is_drawn_on_one_scale() -> None:
    drawn = draw_comparison(PREDICTED, MEASURED, FOUND)
    widths = [float(each) for each in re.findall(r'<rect [^>]*width="([\d.]+)"', drawn)]
    assert len(widths) == 2 * len(PASSES)
    assert drawn.count("rank 0, stage 0") == drawn.count("rank 1, stage 1") == 2
    short, long = widths[0], widths[len(PASSES)]
    assert abs(long / short - 2) < 0.05  # the same pass, measured twice as long as predicted
    assert "http" not in drawn


def test_bars_are_parts_of_the_longer_step() -> None:
    shares = [float(each) for each in re.findall(r"width:([\d.]+)%", draw_phase_bars(FOUND))]
    # in passes, bubble, around: of 14 seconds
    assert shares == [21.43, 21.43, 7.14, 42.86, 42.86, 14.29]
