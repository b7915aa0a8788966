"""Foreign lists with one wrong value, unit, zone, order or sign each: reported, or refused.

A case is a list of a form, a value that is spoiled and how. Whatever is read of a spoiled list must
have the totals of the rows that were left alone, and must say what became of the others.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pytest

from meshwright.errors import InputError
from meshwright.fleet.sources.source import SourceOptions
from meshwright.fleet.sources.source_registry import open_source

ROWS, SPOILED = 40, 17
"""Rows of a list, and the one of them that is spoiled."""


def at(row: int, minutes: float = 0.0, zone: str = "") -> str:
    moment = datetime(2026, 3, 2, 8, tzinfo=UTC) + timedelta(hours=row, minutes=minutes)
    return f"{moment:%Y-%m-%d %H:%M:%S}{zone}"


class Form(NamedTuple):
    """A form of list: its columns with the value of each row, and what they mean."""

    columns: dict[str, Callable[[int], object]]
    counts: str = ""
    """The column with GPUs."""
    times: tuple[str, ...] = ()
    """Columns with moments, in the order in which they must follow one another."""
    dated: bool = False
    """Whether moments are dates."""
    spans: tuple[str, ...] = ()
    """Columns with lengths of time."""
    shares: tuple[str, ...] = ()
    """Columns with percentages."""
    unit_proof: tuple[str, ...] = ()
    """Columns that other columns tell the unit of."""
    table: str = "jobs"
    name: str = "list.csv"


def slurm_like(**more: Callable[[int], object]) -> Form:
    columns: dict[str, Callable[[int], object]] = {
        "job_id": lambda row: f"j{row}",
        "user": lambda row: f"u{row % 3}",
        "gpu_num": lambda row: 1 + row % 8,
        "cpu_num": lambda _: 16,
        "node_num": lambda _: 1,
        "state": lambda _: "COMPLETED",
        "submit_time": at,
        "start_time": lambda row: at(row, 10),
        "end_time": lambda row: at(row, 100),
        "duration": lambda _: 5400,
    }
    times = ("submit_time", "start_time", "end_time")
    return Form(columns | more, "gpu_num", times, dated=True, unit_proof=("duration",))


def _after(row: int, *, step: float, run: float) -> int:
    return round(row * step + run)


def numbered(
    first: str, *names: str, step: float, run: float
) -> dict[str, Callable[[int], object]]:
    """Return columns of plain numbers: the first is when a job comes, the last its end."""
    found: dict[str, Callable[[int], object]] = {first: lambda row: round(row * step)}
    for place, name in enumerate(names, start=1):
        found[name] = partial(_after, step=step, run=place * run)
    return found


FORMS = {
    "any list": slurm_like(),
    "Helios": slurm_like(vc=lambda row: f"vc{row % 2}"),
    "Acme, Seren": slurm_like(type=lambda _: "Eval"),
    "Acme, Kalos": slurm_like(type=lambda _: "Eval", mem_per_pod_GB=lambda _: 100),
    "Philly": Form(
        {
            "timestamp": at, "duration": lambda row: 600 + row, "num_gpus": lambda row: 1 + row % 4,
            "gpu_time": lambda row: (600 + row) * (1 + row % 4), "cluster": lambda _: "vc",
        },
        "num_gpus", ("timestamp",), dated=True, spans=("duration",),
        unit_proof=("duration", "gpu_time"),
    ),
    "Muri": Form(
        {
            "job_id": str, "num_gpu": lambda row: 1 + row % 4,
            "submit_time": lambda row: row * 60_000, "iterations": lambda row: 10_000 + row,
            "model_name": lambda _: "vgg16", "duration": lambda row: (10_000 + row) * 200,
            "iteration_time": lambda _: 200, "resource_time_0": lambda _: 1,
            "priority": lambda _: 0,
        },
        "num_gpu", ("submit_time",), spans=("duration",),
        unit_proof=("duration", "iteration_time"),
    ),
    "Muri, run": Form(
        {
            "job_id": str, "num_gpu": lambda row: 1 + row % 4,
            **numbered("submit_time", "start_time", "end_time", step=600.0, run=300.0),
            "JCT": lambda _: 600,
        },
        "num_gpu", ("submit_time", "start_time", "end_time"), unit_proof=("JCT",),
    ),
    "Chronus": Form(
        {
            "job_id": str, "num_gpu": lambda row: 1 + row % 4, "submit_time": lambda row: row * 60,
            "duration": lambda row: 30 + row, "expect_time_list": lambda row: f"{60 + row}-90",
            "best_effort": lambda _: 0,
        },
        "num_gpu", ("submit_time",), spans=("duration",),
    ),
    "Sia": Form(
        {
            "name": lambda row: f"bert-{row}", "time": lambda row: row * 60,
            "application": lambda _: "bert", "num_replicas": lambda row: 1 + row % 4,
            "batch_size": lambda _: 64,
        },
        "num_replicas", ("time",),
    ),
    "Alibaba 2026 spot": Form(
        {
            "job_name": lambda row: f"s{row}", "organization": lambda _: "o",
            "gpu_model": lambda _: "A100", "gpu_request": lambda row: 1 + row % 4,
            "worker_num": lambda _: 2, "submit_time": lambda row: row * 60,
            "duration": lambda row: 600 + row, "cpu_request": lambda _: 8,
        },
        "gpu_request", ("submit_time",), spans=("duration",),
    ),
    "Alibaba 2023": Form(
        {
            "name": lambda row: f"p{row}", "cpu_milli": lambda _: 4000,
            "memory_mib": lambda _: 1024, "num_gpu": lambda _: 1, "gpu_milli": lambda _: 500,
            **numbered("creation_time", "scheduled_time", "deletion_time", step=60.0, run=300.0),
        },
        "num_gpu", ("creation_time", "scheduled_time", "deletion_time"),
    ),
    "Alibaba 2025": Form(
        {
            "instance_sn": lambda row: f"i{row}", "role": lambda _: "HN", "app_name": lambda _: "a",
            "cpu_request": lambda _: 8, "gpu_request": lambda _: 1,
            **numbered("creation_time", "scheduled_time", "deletion_time", step=60.0, run=300.0),
        },
        "gpu_request", ("creation_time", "scheduled_time", "deletion_time"),
    ),
    "Philly, GPU samples": Form(
        {
            "time": lambda row: at(row, zone=" PDT"), "machineId": lambda _: "m1",
            "gpu0_util": lambda row: 40.5 + row, "gpu1_util": lambda row: 50.25 + row,
        },
        times=("time",), dated=True, shares=("gpu0_util", "gpu1_util"), table="gpu_samples",
    ),
    "Acme, samples": Form(
        {
            "Time": lambda row: at(row, zone="+08:00"), "10.0.0.1-0": lambda row: 40 + row,
            "10.0.0.1-1": lambda row: 50 + row,
        },
        times=("Time",), dated=True, shares=("10.0.0.1-0", "10.0.0.1-1"), table="gpu_samples",
        name="GPU_UTIL.csv",
    ),
    "Philly, memory": Form(
        {
            "time": lambda row: at(row, zone=" PDT"), "machine_id": lambda _: "m1",
            "mem_total": lambda _: 2000, "mem_free": lambda row: 500 + row,
        },
        times=("time",), dated=True, table="node_samples",
    ),
    "Alibaba 2023, nodes": Form(
        {
            "sn": lambda row: f"n{row}", "cpu_milli": lambda _: 64_000,
            "memory_mib": lambda _: 262_144, "gpu": lambda row: 1 + row % 8,
            "model": lambda _: "T4",
        },
        "gpu", table="nodes",
    ),
    "Alibaba 2026, nodes": Form(
        {
            "node_name": lambda row: f"n{row}", "gpu_model": lambda _: "A100",
            "gpu_capacity_num": lambda row: 1 + row % 8, "cpu_num": lambda _: 96,
        },
        "gpu_capacity_num", table="nodes",
    ),
    "Philly, machines": Form(
        {
            "machineId": lambda row: f"m{row}", "number of GPUs": lambda row: 1 + row % 8,
            "single GPU mem": lambda _: "24GB",
        },
        "number of GPUs", table="nodes",
    ),
    "PAI, machines": Form(
        {
            "machine": lambda row: f"m{row}", "gpu_type": lambda _: "T4", "cap_cpu": lambda _: 96,
            "cap_mem": lambda _: 512, "cap_gpu": lambda row: 1 + row % 8,
        },
        "cap_gpu", table="nodes",
    ),
    "Philly, CPU samples": Form(
        {
            "time": lambda row: at(row, zone=" PDT"), "machine_id": lambda _: "m1",
            "cpu_util": lambda row: 20.5 + row,
        },
        times=("time",), dated=True, shares=("cpu_util",), table="node_samples",
    ),
    "our own jobs": Form(
        {
            "cluster": lambda _: "c", "job": str, "attempt": lambda _: 0,
            "gpus": lambda row: 1 + row % 4, "state": lambda _: "completed",
            **numbered("submit_s", "start_s", "end_s", step=600.0, run=300.0),
        },
        "gpus", ("submit_s", "start_s", "end_s"), name="jobs.csv",
    ),
    "our own jobs with dates": Form(
        {
            "cluster": lambda _: "c", "job": str, "attempt": lambda _: 0,
            "gpus": lambda row: 1 + row % 4, "submit_s": lambda row: at(row, zone="Z"),
            "start_s": lambda row: at(row, 10, "Z"), "end_s": lambda row: at(row, 100, "Z"),
        },
        "gpus", ("submit_s", "start_s", "end_s"), dated=True, name="jobs.csv",
    ),
    "sacct": Form(
        {
            "JobID": lambda row: 1000 + row, "State": lambda _: "COMPLETED",
            "Submit": lambda row: at(row).replace(" ", "T"),
            "Start": lambda row: at(row, 90).replace(" ", "T"),
            "End": lambda row: at(row, 190).replace(" ", "T"),
            "AllocTRES": lambda row: f"cpu=8,gres/gpu={1 + row % 4},node=1",
        },
        "AllocTRES", ("Submit", "Start", "End"), dated=True, name="sacct.txt",
    ),
}  # fmt: skip

Rows = list[dict[str, str]]


def rows_of(form: Form) -> Rows:
    return [{name: str(make(row)) for name, make in form.columns.items()} for row in range(ROWS)]


class Case(NamedTuple):
    form: str
    fault: str
    spoil: Callable[[Rows], None]


def put(column: str, value: object) -> Callable[[Rows], None]:
    def spoil(rows: Rows) -> None:
        rows[SPOILED][column] = str(value)

    return spoil


def change(
    column: str, made: Callable[[str], str], *, every: bool = False
) -> Callable[[Rows], None]:
    def spoil(rows: Rows) -> None:
        for row in rows if every else rows[SPOILED : SPOILED + 1]:
            row[column] = made(row[column])

    return spoil


def swap(one: str, other: str) -> Callable[[Rows], None]:
    def spoil(rows: Rows) -> None:
        row = rows[SPOILED]
        row[one], row[other] = row[other], row[one]

    return spoil


def times_1000(value: str) -> str:
    return f"{float(value) * 1000:.0f}"


def gpu_values(form: Form) -> Iterator[tuple[str, str]]:
    bare = {
        "negative GPUs": "-4", "GPUs that are no number": "abc", "infinite GPUs": "inf",
        "GPUs with a unit": "4 GPUs", "GPUs beyond any cluster": "40000000",
        "GPUs with a decimal comma": "1;5",
    }  # fmt: skip
    for fault, value in bare.items():
        if form.counts == "AllocTRES":
            if fault in ("negative GPUs", "GPUs that are no number", "infinite GPUs"):
                yield fault, f"cpu=8,gres/gpu={value},node=1"
        else:
            yield fault, value


def cases() -> Iterator[Case]:
    for name, form in FORMS.items():
        if form.counts:
            for fault, value in gpu_values(form):
                yield Case(name, fault, put(form.counts, value))
        for column in form.times:
            yield Case(name, f"{column} is a word", put(column, "yesterday"))
            yield Case(name, f"{column} is infinite", put(column, "inf"))
            yield Case(name, f"{column} is huge", put(column, "9200000000000000000"))
            yield Case(name, f"{column} is an ambiguous date", put(column, "01/11/2026 00:00"))
            yield Case(name, f"{column} is 30 February", put(column, "2026-02-30 10:00:00"))
            yield Case(
                name, f"{column} has an unknown zone", put(column, "2026-03-02 10:00:00 XYZ")
            )
            if not form.dated:
                yield Case(name, f"{column} is below nought in all", put(column, "-1e12"))
        for one, other in zip(form.times, form.times[1:], strict=False):
            yield Case(name, f"{one} and {other} are swapped", swap(one, other))
        for column in form.spans:
            yield Case(name, f"{column} is negative", change(column, lambda text: f"-{text}"))
            yield Case(name, f"{column} is a word", put(column, "long"))
            yield Case(name, f"{column} lasts for ages", put(column, "1e15"))
        for column in form.shares:
            yield Case(name, f"{column} is above 100 %", put(column, 900))
            yield Case(name, f"{column} is below 0 %", put(column, -5))
            share = change(column, lambda text: f"{float(text) / 100:.4f}", every=True)
            yield Case(name, f"{column} is a share in all rows", share)
        for column in form.unit_proof:
            wrong = change(column, times_1000, every=True)
            yield Case(name, f"{column} is in milliseconds in all rows", wrong)
    yield Case("Philly, memory", "more free than there is", put("mem_free", 99_000))
    yield Case("Alibaba 2023", "more than a GPU in parts", put("gpu_milli", 46_000))
    yield Case("any list", "a job twice", change("job_id", lambda _: "j3"))
    yield Case("our own jobs", "a share in place of GPUs", put("gpus", "-0.5"))


CASES = list(cases())


def written(folder: Path, form: Form, rows: Rows) -> Path:
    text = io.StringIO()
    mark = "|" if form.name == "sacct.txt" else ","
    csv.writer(text, delimiter=mark, lineterminator="\n").writerows(
        [list(form.columns), *(row.values() for row in rows)]
    )
    path = folder / form.name
    path.write_text(text.getvalue(), encoding="utf-8")
    return path


def read(path: Path, table: str, asked: SourceOptions) -> tuple[pa.Table, str]:
    batches = list(open_source(str(path), asked).read_batches())
    parts = [batch.rows for batch in batches if batch.table == table]
    return pa.concat_tables(parts), "\n".join(note for batch in batches for note in batch.notes)


def total(rows: pa.Table, table: str) -> float:
    """Add up what a list is for: GPU-seconds of jobs, or the values of samples."""
    if table == "gpu_samples":
        return float(sum(rows["gpu_util"].to_pylist()))
    if table == "node_samples":
        return float(sum(rows["time_s"].to_pylist()))
    if table == "nodes":
        return float(sum(rows["gpus"].to_pylist()))
    return sum(
        (row["gpus"] or 0.0) * ((row["end_s"] or 1.0) - (row["start_s"] or 0.0))
        for row in rows.select(["gpus", "submit_s", "start_s", "end_s"]).to_pylist()
    )


ASKED = SourceOptions(cluster="c")


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 200
    assert {case.form for case in CASES} == set(FORMS)


@pytest.mark.parametrize("name", FORMS)
def test_lists_that_nobody_spoiled_are_read_whole(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    rows, notes = read(written(tmp_path, form, rows_of(form)), form.table, ASKED)
    assert rows.num_rows == ROWS * max(1, len(form.shares))
    assert "left out" not in notes
    assert total(rows, form.table) > 0


@pytest.mark.parametrize("case", CASES, ids=[f"{case.form}: {case.fault}" for case in CASES])
def test_a_spoiled_list_is_reported_and_its_totals_are_right_or_it_is_refused(
    case: Case, tmp_path: Path
) -> None:
    form, rows = FORMS[case.form], rows_of(FORMS[case.form])
    case.spoil(rows)
    path = written(tmp_path, form, rows)
    try:
        found, notes = read(path, form.table, ASKED)
    except InputError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert path.name in refusal
        return
    sound = [row for at_row, row in enumerate(rows_of(form)) if at_row != SPOILED]
    (tmp_path / "sound").mkdir()
    expected, _ = read(written(tmp_path / "sound", form, sound), form.table, ASKED)
    assert "left out" in notes
    if form.table == "jobs":
        assert total(found, form.table) == pytest.approx(total(expected, form.table))
    else:  # Of a row of samples the values that were not spoiled may be kept.
        assert expected.num_rows <= found.num_rows < ROWS * max(1, len(form.shares))


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.dated])
def test_the_zone_of_dates_is_told_by_the_user_or_by_the_answer(name: str, tmp_path: Path) -> None:
    form, rows = FORMS[name], rows_of(FORMS[name])
    for row in rows:
        for column in form.times:
            row[column] = row[column][:19]
    path = written(tmp_path, form, rows)
    assumed, notes = read(path, form.table, ASKED)
    assert "read as" in notes
    assert "--option zone=" in notes
    asked = ASKED._replace(kind_options={"zone": "Asia/Tokyo"})
    told, notes = read(path, form.table, asked)
    column = "submit_s" if form.table == "jobs" else "time_s"
    first_s = datetime(2026, 3, 1, 23, tzinfo=UTC).timestamp()
    assert min(told[column].to_pylist()) == first_s
    assert "--option zone=" not in notes
    assert told.num_rows == assumed.num_rows


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("option", ["zome", "zone"])
def test_options_work_or_are_refused_with_a_reason(name: str, option: str, tmp_path: Path) -> None:
    form = FORMS[name]
    path = written(tmp_path, form, rows_of(form))
    asked = ASKED._replace(kind_options={option: "Europe/Berlin"})
    if option == "zone" and (form.dated or form.name == "jobs.csv"):
        assert read(path, form.table, asked)[0].num_rows >= ROWS
        return
    with pytest.raises(InputError) as refused:
        open_source(str(path), asked)
    assert ("did you mean" if option == "zome" else "has no dates") in str(refused.value)


def test_a_philly_list_of_attempts_is_checked_like_others(tmp_path: Path) -> None:
    def attempt(start: str, end: str) -> dict[str, object]:
        detail = [{"ip": "m1", "gpus": ["gpu0"]}]
        return {"start_time": start, "end_time": end, "detail": detail}

    jobs = [
        {"jobid": f"a{row}", "status": "Pass", "vc": "v", "submitted_time": at(row),
         "attempts": [attempt(at(row, 1), at(row, 60))]}
        for row in range(ROWS)
    ]  # fmt: skip
    jobs[3]["attempts"] = [attempt(at(3, 60), at(3, 1))]
    jobs[9]["submitted_time"] = "10/11/2017"
    path = tmp_path / "cluster_job_log"
    path.write_text(json.dumps(jobs), encoding="utf-8")
    found, notes = read(path, "jobs", ASKED)
    assert found.num_rows == ROWS - 2
    held, _ = read(path, "allocations", ASKED)
    assert set(held["job"].to_pylist()) == set(found["job"].to_pylist())
    assert "lies before the start" in notes
    assert "'10/11/2017' is no time" in notes
