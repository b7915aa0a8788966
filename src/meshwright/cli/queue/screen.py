"""What a queue came to, as one screen."""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.cli.queue.jobs import QueueWorkload
from meshwright.cli.result import NoteView, View, make_fields, make_table
from meshwright.policy.job_queue.policy_registry import POLICIES
from meshwright.predict.job_queue.outcome import QueueOutcome, QueuePercentiles
from meshwright.spec.units import format_quantity

_SAID = {
    "exact": "what they took (an oracle)",
    "limit": "their limits",
    "predicted": "what earlier jobs took",
}


def describe_run(args: argparse.Namespace, read: QueueWorkload, gpus: float) -> dict[str, Any]:
    """Return what was simulated, as data."""
    placed = args.gpus_per_node or args.nodes or (args.gpus is None and read.nodes)
    return {
        "source": str(args.jobs),
        "gpus": gpus,
        "placement": args.placement if placed else None,
        "runtime_estimate": read.estimate_kind,
        "skipped": read.skipped,
    }


def render_run(
    read: QueueWorkload, policy: str, found: QueueOutcome, gpus: float
) -> tuple[View, ...]:
    """Show one run."""
    fair = found.fairness
    pairs = {
        "policy": f"{policy}: {POLICIES[policy].summary}",
        "jobs": f"{found.jobs:,}, {_hours(found.gpu_hours)} on "
        f"{format_quantity(round(gpus), 'GPU')}",
        "estimates": _SAID[read.estimate_kind] if POLICIES[policy].needs_estimates else None,
        "makespan": _time(found.makespan_s),
        "completion": _line(found.jct_s),
        "first wait": _line(found.wait_s),
        "slowdown": f"mean {found.slowdown.mean:,.1f}, median {found.slowdown.p50:,.1f}, "
        f"95 % {found.slowdown.p95:,.1f}",
        "GPUs held": f"{found.allocated_fraction:.1%} of the time; work {found.utilization:.1%}",
        "goodput": f"{found.goodput:.1%} of what is held",
        "waiting": f"{found.mean_pending_jobs:,.1f} jobs on average",
        "idle while waiting": f"{found.pending_while_idle_fraction:.1%} of the time, "
        f"{_hours(found.pending_idle_gpu_hours)}",
        "largest free block": f"{found.mean_largest_free_block:,.1f} GPUs on average",
        "fairness": f"Jain {fair.jain_index:.3f} over "
        f"{format_quantity(fair.num_groups, 'team or user', 'teams or users')}; finish-time ratio "
        f"{fair.finish_time_ratio.mean:,.2f}, worst {fair.finish_time_ratio.max:,.1f}, "
        f"{fair.unfair_fraction:.0%} above 1",
        "stopped": f"{found.preemptions:,} times, moved {found.migrations:,}, failed "
        f"{found.failures:,}"
        if found.preemptions or found.migrations or found.failures
        else None,
        "cost of that": f"{_hours(found.paused_gpu_hours)} paused, {found.lost_gpu_hours:,.0f} lost"
        if found.paused_gpu_hours or found.lost_gpu_hours
        else None,
        "deadlines": f"{found.missed_deadlines:,} of {found.jobs_with_deadline:,} missed"
        if found.jobs_with_deadline
        else None,
    }
    rows = [
        (
            size.gpus, f"{size.jobs:,}", _time(size.wait_s.mean), _time(size.wait_s.p50),
            _time(size.wait_s.p95), _time(size.jct_s.mean), _time(size.jct_s.p95),
        )
        for size in found.by_size
    ]  # fmt: skip
    columns = "GPUs,jobs,wait,median,95 %,completion,95 % "
    sizes = make_table(columns, rows, "by size", right=columns)
    return make_fields(pairs), sizes, *_notes(read)


def render_comparison(
    read: QueueWorkload, found: Mapping[str, QueueOutcome], gpus: float
) -> tuple[View, ...]:
    """Show several runs side by side."""
    best = min(one.jct_s.mean for one in found.values())
    stops = any(one.preemptions for one in found.values())
    times = [
        (
            name, _time(one.jct_s.mean), f"{one.jct_s.mean / best:.2f}×", _time(one.jct_s.p50),
            _time(one.jct_s.p99), _time(one.wait_s.mean), _time(one.makespan_s),
        )
        for name, one in found.items()
    ]  # fmt: skip
    shares = [
        (
            name, f"{one.allocated_fraction:.1%}", f"{one.pending_while_idle_fraction:.0%}",
            f"{one.fairness.jain_index:.3f}",
            f"{one.fairness.finish_time_ratio.max:,.1f}",
            *([f"{one.preemptions:,}"] if stops else ()),
        )
        for name, one in found.items()
    ]  # fmt: skip
    title = (
        f"{format_quantity(len(read.requests), 'job')} on {format_quantity(round(gpus), 'GPU')}; "
        f"estimates: {_SAID[read.estimate_kind]}"
    )
    # One table of all of this is wider than 80 columns.
    return (
        _by_policy("completion,of best,median,99 %,wait,makespan", times, title),
        _by_policy("held,idle & waiting,Jain,worst ratio" + ",stops" * stops, shares),
        *_notes(read),
    )


def _by_policy(columns: str, rows: Sequence[Sequence[str]], title: str = "") -> View:
    return make_table(f"policy,{columns}", rows, title, right=columns)


def _notes(read: QueueWorkload) -> tuple[NoteView, ...]:
    mixed: tuple[NoteView, ...] = ()
    if len(read.clusters) > 1:
        named = ", ".join(read.clusters[:3]) + (", …" if len(read.clusters) > 3 else "")
        what = f"jobs of {len(read.clusters)} clusters share these GPUs; --cluster NAME takes one"
        mixed = (NoteView(f"{what}: {named}"),)
    left_out = (
        NoteView(f"left out: rows that {why} ({count:,})") for why, count in read.skipped.items()
    )
    return (*mixed, *left_out, *map(NoteView, read.notes))


def _hours(gpu_hours: float) -> str:
    """Show GPU-hours, few of them in three digits."""
    if gpu_hours >= 100:
        return f"{gpu_hours:,.0f} GPU-hours"
    return format_quantity(float(gpu_hours), "GPU-hour")


def _line(spread: QueuePercentiles) -> str:
    return (
        f"mean {_time(spread.mean)}, median {_time(spread.p50)}, 95 % {_time(spread.p95)}, "
        f"99 % {_time(spread.p99)}"
    )


def _time(seconds: float) -> str:
    """Show a time in the unit that suits it, in three digits."""
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:,.3g} {unit}"
    days = seconds / 86400
    return f"{days:,.3g} d" if days < 1000 else f"{days:,.0f} d"
