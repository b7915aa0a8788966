"""Every row has its answer in order, and no row can stop the scoring."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.predict.validation.collectives import (
    read_sweep_rows,
    score_collective,
    score_collectives,
    summarize_collectives,
)
from validation.collectives.pack import RUNS

ROWS = read_sweep_rows(RUNS)
ROW: dict[str, Any] = {
    "system": "a cluster",
    "gpu": "H100 80GB HBM3",
    "nodes": 2,
    "gpus": 16,
    "gpus_per_node": 8,
    "intra": "NVLink4 (H100/H200 NVSwitch)",
    "inter": "8x400Gb/s NDR IB",
    "collective": "all_reduce",
    "size_bytes": 1 << 30,
    "time_us": 4500.0,
}


def test_every_row_has_an_answer_in_order() -> None:
    scored = score_collectives(ROWS)
    assert [item.row for item in scored] == list(range(len(ROWS)))
    assert all((item.predicted_us is None) == (item.skipped is not None) for item in scored)


def test_only_rows_without_a_size_or_a_known_gpu_are_skipped() -> None:
    for item in score_collectives(ROWS):
        if item.skipped is None:
            continue
        row = ROWS[item.row]
        unsized = row["size_bytes"] is None
        assert unsized or not row["gpu"] or not row["gpus"] or row["gpu"].startswith("GB10")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": None}, "GPU"),
        ({"gpu": "TPU v9"}, "catalog"),
        ({"gpus": None, "nodes": None}, "how many"),
        ({"size_bytes": None}, "no message size"),
        ({"size_bytes": -1}, "size_bytes is -1"),
        ({"size_bytes": "1 MiB"}, "size_bytes is '1 MiB'"),
        ({"size_bytes": math.nan}, "size_bytes is nan"),
        ({"gpus": True}, "gpus is True"),
        ({"collective": None}, "no collective"),
    ],
)
def test_row_that_cannot_be_predicted_says_why(changes: dict[str, object], reason: str) -> None:
    answer = score_collective({**ROW, **changes})
    assert answer.predicted_us is None
    assert answer.error is None
    assert reason in (answer.skipped or "")


@pytest.mark.parametrize("time_us", [None, 0, -3, "fast", math.inf])
def test_row_without_a_usable_measurement_is_still_predicted(time_us: object) -> None:
    answer = score_collective({**ROW, "time_us": time_us})
    assert answer.predicted_us is not None
    assert answer.measured_us is None
    assert answer.error is None
    assert answer.skipped is None


PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
ODD = st.one_of(PLAIN, st.lists(PLAIN, max_size=2), st.dictionaries(st.text(max_size=3), PLAIN))


@given(st.dictionaries(st.sampled_from([*ROW, "note", "algo", "nccl_version"]), ODD))
def test_no_field_stops_the_scoring(changes: dict[str, object]) -> None:
    answer = score_collective({**ROW, **changes})
    assert (answer.predicted_us is None) == (answer.skipped is not None)


def test_summary_counts_every_row_once() -> None:
    scored = score_collectives([*ROWS[:40], {"gpu": "H100"}, 3, {**ROW, "time_us": None}])
    summed = summarize_collectives(scored)
    assert sum(group.rows for group in summed.by_fabric.values()) == summed.overall.rows
    assert sum(summed.skipped.values()) == sum(item.skipped is not None for item in scored)
    assert summed.unmeasured == 1
