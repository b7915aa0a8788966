"""Of a step on processors, all that its host did but wait is compute."""

from meshwright.observe.analyze.spans.device_spans import find_device_spans
from meshwright.observe.analyze.spans.intervals import COMPUTE, measure_total_ns
from meshwright.observe.twin.measured_step import add_compute_spans
from meshwright.timeline import Timeline

Row = tuple[int, str, str, str, int, int]
"""Rank, lane, kind, name, start, end."""

STEP: tuple[Row, ...] = (
    (0, "host", "host", "step 4", 0, 100),
    (0, "forward-backward", "host", "forward", 0, 30),
    (0, "comm tp", "communication", "all_reduce sum tp", 10, 20),
    (0, "host", "wait", "wait for all_reduce sum tp", 12, 20),
    (0, "forward-backward", "host", "backward", 40, 70),
    (0, "host", "host", "grad reduce", 70, 80),
    (0, "host", "wait", "wait for all_reduce sum dp", 70, 78),
    (0, "host", "host", "optimizer", 80, 95),
    (1, "forward-backward", "host", "forward", 5, 25),
)


def recorded(*rows: Row) -> Timeline:
    rank, lane, kind, name, start, end = (list(column) for column in zip(*rows, strict=True))
    lengths = [last - first for first, last in zip(start, end, strict=True)]
    columns = {"rank": rank, "process": "host", "lane": lane, "kind": kind, "name": name}
    times = {"start_ns": start, "duration_ns": lengths}
    return Timeline.from_columns({**columns, **times}, source="measured", metadata={"step_s": "1"})


def test_waits_inside_a_pass_are_no_compute() -> None:
    first, second = add_compute_spans(recorded(*STEP)).split_by_rank()
    spans = find_device_spans(first)
    # forward without its 8 of waiting, backward, 2 of gradients, the update
    assert measure_total_ns(spans.intervals_of(COMPUTE)) == 22 + 30 + 2 + 15
    assert measure_total_ns(find_device_spans(second).intervals_of(COMPUTE)) == 20


def test_nothing_that_was_recorded_is_lost() -> None:
    before = recorded(*STEP)
    after = add_compute_spans(before)
    assert after.metadata == before.metadata
    names = after.string_column("name").values
    assert set(names) == {row[3] for row in STEP}
    assert after.num_spans == len(STEP) + 6  # two ranks: five pieces and one
