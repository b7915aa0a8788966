"""The long run on the command line: flags for its assumptions, and what `mw simulate` shows."""

import argparse
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from meshwright.cli.flags.spec_fields import (
    add_fields,
    coerce_values,
    read_environment,
    read_flag_values,
)
from meshwright.cli.flags.work import ResolvedWork
from meshwright.cli.result import FieldsView, NoteView, TableView, View, make_fields, make_table
from meshwright.errors import InputError
from meshwright.predict.long_run.long_run import LongRun, predict_long_run
from meshwright.predict.long_run.reliability import RELIABILITY, Reliability
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.serialization import decode
from meshwright.spec.units import format_bytes, format_count, format_seconds

RELIABILITY_TABLE = "reliability"
_PARTS = (
    ("steps that count", "useful_s"),
    ("pauses for checkpoints", "checkpointing_s"),
    ("work done again", "lost_work_s"),
    ("restarts", "restarts_s"),
    ("waiting for repairs", "waiting_s"),
)
_BAR = 30


class LongRunViews(NamedTuple):
    """A long run as data for scripts and views for people."""

    data: dict[str, Any]
    """The fields of `LongRun`; times without end are null."""
    views: tuple[View, ...]


def add_reliability(parser: argparse.ArgumentParser) -> None:
    """Add one flag for every assumption, such as `--spares` and `--repair-s`."""
    add_fields(parser, Reliability, RELIABILITY_TABLE)


def read_reliability(
    args: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> Reliability:
    """Read the assumptions that environment variables and flags change; flags win."""
    flags = coerce_values(Reliability, read_flag_values(args, RELIABILITY_TABLE))
    data = {**read_environment(Reliability, RELIABILITY_TABLE, environment), **flags}
    try:
        return decode(Reliability, data)
    except InputError as error:
        raise InputError(
            problem._replace(where=_flag(problem.where)) for problem in error.problems
        ) from None


def is_long_run(asked: ResolvedWork) -> bool:
    """Tell whether the work names the tokens to train on; without them there is no run to price."""
    return asked.origins.get("workload.tokens", "default") != "default"


def build_long_run_views(
    work: JobSpec, step_s: float, assumed: Reliability = RELIABILITY
) -> LongRunViews:
    """Predict the run and lay it out."""
    try:
        run = predict_long_run(work, step_s, assumed)
    except InputError as error:
        fields = Reliability.__struct_fields__
        raise InputError(
            problem._replace(where=_flag(problem.where)) if problem.where in fields else problem
            for problem in error.problems
        ) from None
    notes = tuple(NoteView(line) for line in run.assumed)
    return LongRunViews(_data(run), (_summary(work, run), _breakdown(run), *notes))


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def _data(run: LongRun) -> dict[str, Any]:
    values: dict[str, Any] = msgspec.to_builtins(run)
    # JSON has no infinity.
    return {**values, "mtbf_s": None if math.isinf(run.mtbf_s) else run.mtbf_s}


def _summary(work: JobSpec, run: LongRun) -> FieldsView:
    tokens = getattr(work.workload, "tokens", 0)
    saved, price = run.checkpoint, run.price
    failures = "none"
    if run.expected_failures:
        failures = (
            f"about {run.expected_failures:,.0f}, one every {format_seconds(run.mtbf_s)}; "
            f"a restart takes {format_seconds(run.restart_s)}"
        )
    return make_fields(
        {
            "calendar": f"{format_seconds(run.calendar_s)}, "
            f"{run.goodput:.1%} of it steps that count",
            "GPU-hours": f"{format_count(run.gpu_hours)}, {run.spares:,} spare nodes included",
            "price": None if price is None else f"${price:,.0f}",
            "failures": failures,
            "checkpoints": f"{format_bytes(saved.total_bytes)} every {run.interval_steps:,} steps "
            f"({format_seconds(run.interval_s)}): {format_seconds(saved.pause_s)} of pause, "
            f"written in {format_seconds(saved.write_s)}",
        },
        f"training on {format_count(tokens)} tokens",
    )


def _breakdown(run: LongRun) -> TableView:
    rows = []
    for name, field in _PARTS:
        seconds = getattr(run, field)
        if seconds > 0:
            share = seconds / run.calendar_s
            rows.append((name, format_seconds(seconds), f"{share:.1%}", "█" * round(_BAR * share)))
    return make_table("where the calendar goes, time, share, bar", rows, right="time, share")
