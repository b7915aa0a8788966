"""`mw fleet top`: who holds which GPUs, on the mean of the last minutes and at their end."""

import argparse
from typing import Any

import numpy as np

from meshwright.cli.fleet.account_reader import read_account
from meshwright.cli.fleet.flags import add_scope, add_store, open_store, read_scope
from meshwright.cli.result import CommandResult, NoteView, make_fields, make_table
from meshwright.fleet.account import BUCKETS, GpuHourAccount, to_gpu_hours
from meshwright.fleet.account.attempts import match_states
from meshwright.fleet.account.goodput import GROUP_KEYS, compute_goodput, count_held_at_end
from meshwright.fleet.account.inventory import decode_text
from meshwright.fleet.account.report import goodput_to_data
from meshwright.fleet.account.ticks import PARTS_PER_GPU, UNKNOWN_TIME
from meshwright.fleet.time_format import format_clock, format_day
from meshwright.spec.units import format_quantity, format_seconds, parse_count

EXAMPLES = (
    "mw fleet top",
    "mw fleet top --by job --top 20",
    "mw fleet top --by team --redact --json",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("--by", choices=GROUP_KEYS, default="user", help="who (default: user)")
    parser.add_argument("--top", default="25", metavar="N", help="how many (default: 25)")
    parser.add_argument(
        "--last", dest="since", default="15min", metavar="TIME",
        help="the time before that means are of (default: 15min)",
    )  # fmt: skip
    parser.add_argument(
        "--at", dest="until", metavar="WHEN",
        help="another moment: 1h (ago), 2026-11-16T08:00 (default: the last that is known)",
    )  # fmt: skip
    add_scope(parser)
    add_store(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with who holds what."""
    top = parse_count(args.top, "--top")
    with open_store(args) as store:
        found = read_account(store, args, read_scope(store, args))
    return make_result(found, args.by, top)


def make_result(found: GpuHourAccount, by: str, top: int) -> CommandResult:
    """Return who holds what, the most first."""
    span_h = found.window.duration_ms / 3.6e6
    groups = compute_goodput(found, by, top)
    waiting = _waiting(found)
    buckets = found.sum_buckets()
    free = sum(buckets[bucket.name] for bucket in BUCKETS if not bucket.allocated)
    now_s, at_end = found.window.until_ms / 1e3, count_held_at_end(found, by)
    span = format_seconds(span_h * 3600)
    head = {
        "at": f"{format_day(now_s)} {format_clock(now_s)}",
        "held then": format_quantity(round(sum(at_end.values()), 1), "GPU"),
        f"mean of {span}": f"{to_gpu_hours(found.capacity) / span_h:,.1f}: "
        f"{to_gpu_hours(found.allocated) / span_h:,.1f} held, "
        f"{to_gpu_hours(buckets['idle']) / span_h:,.1f} of them idle; "
        f"{to_gpu_hours(free) / span_h:,.1f} free or "
        "down",
        "waiting": f"{format_quantity(round(waiting[1]), 'GPU')} asked for by "
        f"{format_quantity(waiting[0], 'job')}",
    }
    whose = _whose(found) if by == "job" else {}
    rows = [
        (
            one.name or "(not told)", f"{one.allocated_hours / span_h:,.1f}",
            f"{at_end.get(one.name, 0.0):,.1f}",
            *(whose.get(one.name, ("", "")) if whose else (f"{one.num_attempts:,}",)),
            f"{one.hours_by_bucket['idle'] / span_h:,.1f}",
            "" if one.program_goodput is None else f"{100 * one.program_goodput:.0f} %",
            f"{one.pending_hours / span_h:,.1f}", _share(one.unknown_hours, one.allocated_hours),
        )
        for one in groups
    ]  # fmt: skip
    middle = "user, for" if whose else "jobs"
    columns = f"{by}, GPUs, at the end, {middle}, idle, tensor or MFU, waits for, not measured"
    right = "GPUs, at the end, jobs, for, idle, tensor or MFU, waits for, not measured"
    view = make_table(columns, rows, f"Means of {span} up to then", right=right)
    data: dict[str, Any] = {
        "at_s": found.window.until_ms / 1e3,
        "duration_s": span_h * 3600,
        "gpus": to_gpu_hours(found.capacity) / span_h,
        "allocated": to_gpu_hours(found.allocated) / span_h,
        "allocated_at_end": sum(at_end.values()),
        "idle": to_gpu_hours(buckets["idle"]) / span_h,
        "pending_jobs": waiting[0],
        "pending_gpus": waiting[1],
        "group_by": by,
        "groups": [
            {
                **goodput_to_data(one),
                "gpus": one.allocated_hours / span_h,
                "gpus_at_end": at_end.get(one.name, 0.0),
            }
            for one in groups
        ],
    }
    notes = () if groups else (NoteView("nobody holds a GPU or waits for one at that time"),)
    quiet = tuple(f"{one.name}\t{one.allocated_hours / span_h:.1f}" for one in groups)
    return CommandResult("fleet-top/2", data, (make_fields(head), view, *notes), quiet)


def _waiting(found: GpuHourAccount) -> tuple[int, float]:
    """How many jobs wait at the end, and for how many GPUs."""
    jobs = found.attempts
    still = (jobs.pending_end_ms > found.window.until_ms) | (
        match_states(jobs, "pending") & (jobs.start_ms == UNKNOWN_TIME)
    )
    waits = (
        still
        & (jobs.pending_start_ms != UNKNOWN_TIME)
        & (jobs.pending_start_ms < found.window.until_ms)
        & (jobs.gpu_parts > 0)
    )
    return int(waits.sum()), float(np.sum(jobs.gpu_parts[waits])) / PARTS_PER_GPU


def _whose(found: GpuHourAccount) -> dict[str, tuple[str, str]]:
    """Of each job that holds or waits for anything, its user and for how long it has run."""
    jobs, told = found.attempts, {}
    several = len(jobs.cluster.values) > 1
    held = found.cells_by_attempt.sum(axis=1) > 0
    for at in np.flatnonzero(held | (found.pending > 0)).tolist():
        name = decode_text(jobs.job.values, jobs.job.codes[at])
        if several:
            name = f"{decode_text(jobs.cluster.values, jobs.cluster.codes[at])}/{name}"
        ran_s = (min(int(jobs.end_ms[at]), found.window.until_ms) - int(jobs.start_ms[at])) / 1e3
        if held[at] or name not in told:
            ran = format_seconds(ran_s) if held[at] else ""
            told[name] = decode_text(jobs.user.values, jobs.user.codes[at]), ran
    return told


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole > 0 else ""
