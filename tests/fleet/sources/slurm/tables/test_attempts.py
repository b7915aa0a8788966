"""Attempts of jobs, whatever order their records come in and however often."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from meshwright.fleet.sources.slurm.job_records import make_records_from_rows
from meshwright.fleet.sources.slurm.tables.jobs import build_job_rows


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Jobs of one or more attempts, each seen waiting, running and ended, in any order."""
    records: list[dict[str, Any]] = []
    for job in range(draw(st.integers(1, 4))):
        time = draw(st.integers(0, 50))
        count = draw(st.integers(1, 3))
        for attempt in range(count):
            submit, start = time, time + draw(st.integers(0, 5))
            time = end = start + draw(st.integers(1, 9))
            last = attempt == count - 1
            views: list[dict[str, Any]] = [
                {"state": "PENDING"},
                {"state": "RUNNING", "start_s": float(start), "name": "n"},
                {
                    "state": "FAILED" if last else "REQUEUED",
                    "start_s": float(start),
                    "end_s": float(end),
                },
            ]
            # What was seen of it, at least how it ended, some of it twice.
            seen = [*draw(st.lists(st.sampled_from(views), max_size=3)), views[2]]
            records += [{"id": f"{job}", "submit_s": float(submit), **view} for view in seen]
    return list(draw(st.permutations(records)))


@given(histories())
def test_order_and_repetition_change_nothing(records: list[dict[str, Any]]) -> None:
    rows = build_job_rows(make_records_from_rows(records), 99.0).rows.to_pylist()
    found = {(row["job"], row["attempt"]): row for row in rows}
    assert len(found) == len(rows)
    submits = {(record["id"], record["submit_s"]) for record in records}
    assert {(row["job"], row["submit_s"]) for row in rows} == submits
    for job in {row["job"] for row in rows}:
        mine = [row for row in rows if row["job"] == job]
        mine.sort(key=lambda row: row["attempt"])
        assert [row["attempt"] for row in mine] == list(range(len(mine)))
        assert [row["submit_s"] for row in mine] == sorted(row["submit_s"] for row in mine)
        assert [row["state"] for row in mine] == ["requeued"] * (len(mine) - 1) + ["failed"]


@given(histories())
def test_what_one_record_leaves_out_another_fills_in(records: list[dict[str, Any]]) -> None:
    rows = build_job_rows(make_records_from_rows(records), 99.0).rows.to_pylist()
    named = {(record["id"], record["submit_s"]) for record in records if "name" in record}
    assert {(row["job"], row["submit_s"]) for row in rows if row["name"] == "n"} == named


def test_no_records_are_no_rows() -> None:
    assert build_job_rows(make_records_from_rows([]), 1.0).rows.num_rows == 0
