"""Of a recorded run the step of middle length is taken, on every rank."""

import pytest

from meshwright.errors import InputError
from meshwright.observe.twin.measured_step import select_median_step
from meshwright.timeline import Timeline

STARTS = (0, 30, 40, 60)
"""Steps of 30, 10 and 20 ns, and one whose end is not known."""


def recorded(*starts: int) -> Timeline:
    names, begins, ranks = [], [], []
    for rank in (0, 1):
        for number, start in enumerate(starts):
            names += [f"step {number + 3}", f"forward {number}"]
            begins += [start + rank, start + rank + 1]
            ranks += [rank, rank]
    columns = {
        "rank": ranks,
        "process": "host",
        "lane": "host",
        "kind": "host",
        "name": names,
        "start_ns": begins,
        "duration_ns": 1,
    }
    return Timeline.from_columns(columns, source="measured")


def test_middle_step_is_kept_with_its_spans_on_every_rank() -> None:
    found = select_median_step(recorded(*STARTS))
    names = found.string_column("name")
    kept = sorted(str(names.values[code]) for code in names.codes)
    assert kept == ["forward 2", "forward 2", "step 5", "step 5"]
    assert float(found.metadata["step_s"]) == pytest.approx(20e-9)
    assert found.metadata["steps"] == "3"


def test_shorter_of_two_middle_steps_is_taken() -> None:
    assert float(select_median_step(recorded(*STARTS[:3])).metadata["step_s"]) == pytest.approx(
        10e-9
    )


def test_one_step_is_too_few() -> None:
    with pytest.raises(InputError, match="has 1 steps"):
        select_median_step(recorded(0))
