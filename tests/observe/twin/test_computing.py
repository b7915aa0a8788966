"""Of a step on processors, all that its host did but wait is compute."""

from meshwright.observe.analyze.spans import COMPUTE, device_spans, measure
from meshwright.observe.twin.computing import with_compute
from meshwright.timeline import Timeline

Row = tuple[int, str, str, str, int, int]
"""Rank, lane, kind, name, start, end."""

STEP: tuple[Row, ...] = (
    (0, "main", "host", "step 4", 0, 100),
    (0, "passes", "host", "forward", 0, 30),
    (0, "exchange tp", "communication", "all_reduce sum tp", 10, 20),
    (0, "main", "wait", "wait for all_reduce sum tp", 12, 20),
    (0, "passes", "host", "backward", 40, 70),
    (0, "main", "host", "gradients", 70, 80),
    (0, "main", "wait", "wait for all_reduce sum dp", 70, 78),
    (0, "main", "host", "optimizer", 80, 95),
    (1, "passes", "host", "forward", 5, 25),
)


def recorded(*rows: Row) -> Timeline:
    rank, lane, kind, name, start, end = (list(column) for column in zip(*rows, strict=True))
    lengths = [last - first for first, last in zip(start, end, strict=True)]
    columns = {"rank": rank, "process": "host", "lane": lane, "kind": kind, "name": name}
    times = {"start_ns": start, "duration_ns": lengths}
    return Timeline.from_columns({**columns, **times}, source="measured", metadata={"step_s": "1"})


def test_waits_inside_a_pass_are_no_compute() -> None:
    first, second = with_compute(recorded(*STEP)).by_rank()
    spans = device_spans(first)
    # forward without its 8 of waiting, backward, 2 of gradients, the update
    assert measure(spans.of(COMPUTE)) == 22 + 30 + 2 + 15
    assert measure(device_spans(second).of(COMPUTE)) == 20


def test_nothing_that_was_recorded_is_lost() -> None:
    before = recorded(*STEP)
    after = with_compute(before)
    assert after.metadata == before.metadata
    names = after.strings("name").values
    assert set(names) == {row[3] for row in STEP}
    assert after.num_spans == len(STEP) + 6  # two ranks: five pieces and one
