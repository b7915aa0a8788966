"""The screens of `mw watch`: how a job runs, what became slower, where it stands."""

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime

from meshwright.cli.result import NoteView, TextView, View, make_fields, make_table
from meshwright.observe.hardware.hardware_sample import GpuSample, format_throttle_reason
from meshwright.observe.watch.stack_dump import ProcessStacks
from meshwright.observe.watch.watch_status import HangStatus, SlowdownStatus, WatchStatus
from meshwright.spec.units import format_bytes, format_ranks, format_seconds

_MOST_RANKS = 8
_MOST_CAPTURES = 8
_MOST_EVENTS = 5
_MOST_FRAMES = 12


def render_status(status: WatchStatus, folder: str) -> tuple[View, ...]:
    """One screen of a watch."""
    views: list[View] = [make_fields(_summary(status, folder))]
    if len({row.state for row in status.ranks}) > 1 or 1 < len(status.ranks) <= _MOST_RANKS:
        views.append(_ranks(status))
    views += _slowdowns(status.slowdowns, ended=status.exit_code is not None)
    views += _hangs(status.hangs, folder)
    if status.captures:
        views.append(_captures(status))
    steps = suggest_commands(status, folder)
    if steps:
        views.append(TextView("\n".join(f"next: {step}" for step in steps)))
    views += [NoteView(note) for note in status.notes]
    if status.has_errors:
        views.append(NoteView(f"something went wrong while watching: see {folder}/log.txt"))
    return tuple(views)


def _summary(status: WatchStatus, folder: str) -> dict[str, object]:
    return {
        "job": _short(status.command, 84),
        "state": _state(status),
        "steps": _steps(status),
        "watching": _watching(status),
        "ended early": _deaths(status.lost_processes),
        "hardware": _hardware(status),
        "folder": folder,
    }


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _state(status: WatchStatus) -> str:
    took = format_seconds(status.elapsed_s)
    if status.exit_code is None:
        since = datetime.fromtimestamp(status.started_unix_s, UTC)
        return f"runs since {since:%Y-%m-%d %H:%M:%S} UTC, {took}"
    return f"ended after {took}, exit code {status.exit_code}"


def _steps(status: WatchStatus) -> str:
    if not status.steps:
        if not status.processes:
            return "none: no process of the job imported torch with the watcher's hook"
        yet = " yet" if status.exit_code is None else ""
        return f"none{yet}: {status.processes} processes imported torch, no optimizer of it stepped"
    said = f"{status.steps:,}"
    if status.step_ms is None:
        return said
    vary = f"± {100 * (status.step_time_variation or 0):.1f} % (middle half)"
    return f"{said} of {status.step_ms:,.2f} ms {vary}, slowest {status.slowest_ms:,.2f} ms"


def _watching(status: WatchStatus) -> str:
    kept = len(status.captures)
    bound = f"{100 * status.max_overhead:g} % allowed"
    if status.fixed_interval:
        bound = f"every {status.capture_interval:,} steps, as asked"
    said = f"took {100 * status.overhead_share:.2f} % of the time ({bound})"
    said += f"; {status.captures_taken} captures, {kept} kept"
    return said + (f", {status.captures_refused} refused" if status.captures_refused else "")


def _deaths(deaths: Sequence[str]) -> str:
    if not deaths:
        return ""
    more = f"; then {len(deaths) - 1} more" if len(deaths) > 1 else ""
    return deaths[0] + more


def _hardware(status: WatchStatus) -> str:
    found = status.hardware
    if found.gpus:
        shown = "; ".join(_gpu(gpu) for gpu in found.gpus[:2])
        more = len(found.gpus) - 2
        return shown + (f"; {more} more GPUs" if more > 0 else "")
    if found.job_cores is None:
        return ""
    said = f"{found.job_cores:.1f} cores"
    if found.machine_cores is not None:
        said += f" of {found.machine_cores:.1f} busy"
    return said + (f", {format_bytes(found.memory_bytes)}" if found.memory_bytes else "")


def _gpu(gpu: GpuSample) -> str:
    parts = [f"GPU {gpu.index}"]
    if gpu.utilization is not None:
        parts.append(f"{100 * gpu.utilization:.0f} %")
    if gpu.clock_mhz is not None:
        parts.append(f"{gpu.clock_mhz:.0f} MHz")
    if gpu.power_w is not None:
        parts.append(f"{gpu.power_w:.0f} W")
    if gpu.temperature_c is not None:
        parts.append(f"{gpu.temperature_c:.0f} °C")
    if gpu.memory_bytes is not None:
        parts.append(format_bytes(gpu.memory_bytes))
    if gpu.throttle_reasons:
        parts.append(f"throttled: {', '.join(map(format_throttle_reason, gpu.throttle_reasons))}")
    return " ".join(parts)


def _ranks(status: WatchStatus) -> View:
    rows: list[tuple[object, ...]] = [
        (
            row.rank,
            row.steps,
            f"{row.step_ms:,.2f}" if row.step_ms is not None else "",
            f"{100 * row.overhead_share:.2f} %",
            row.captures,
            row.state,
        )
        for row in status.ranks[:_MOST_RANKS]
    ]
    if len(status.ranks) > _MOST_RANKS:
        rows.append(("…", "", "", "", "", f"{len(status.ranks) - _MOST_RANKS} more in --json"))
    return make_table(
        "rank, steps, step ms, watching, captures, state", rows, "ranks",
        right="rank, steps, step ms, watching, captures",
    )  # fmt: skip


def _slowdowns(slowdowns: Sequence[SlowdownStatus], *, ended: bool) -> list[View]:
    if not slowdowns:
        return []
    rows = []
    last = "to the end" if ended else "until now"
    for one in slowdowns[-_MOST_EVENTS:]:
        rise = 100 * (one.after_ms / one.before_ms - 1) if one.before_ms else 0.0
        until = f"until {one.until_step:,}" if one.until_step is not None else last
        said = [*one.changes, *([one.finding] if one.finding else [])]
        rows.append(
            (
                f"{one.step:,}",
                f"{one.before_ms:,.2f}",
                f"{one.after_ms:,.2f}",
                f"+{rise:.0f} %",
                until,
                "; ".join(said) or _nothing_said(one),
            )
        )
    more = len(slowdowns) - _MOST_EVENTS
    title = "slowdowns" + (f" (the last {_MOST_EVENTS} of {len(slowdowns)})" if more > 0 else "")
    return [
        make_table(
            "from step, ms before, ms after, rise, lasts, what changed", rows, title,
            right="from step, ms before, ms after, rise", wide="what changed",
        )
    ]  # fmt: skip


def _nothing_said(one: SlowdownStatus) -> str:
    if not one.capture:
        return "no capture of it"
    return "no part of the step grew" if one.reference else "no capture from before it to compare"


def _hangs(hangs: Sequence[HangStatus], folder: str) -> list[View]:
    views: list[View] = []
    for one in hangs[-2:]:
        ended = (
            f"went on after {format_seconds(one.resumed_after_s)}"
            if one.resumed_after_s is not None
            else "did not go on"
        )
        title = (
            f"no step for {format_seconds(one.detected_after_s)} after step {one.last_step:,}; "
            f"it {ended}"
        )
        if not one.folder:
            views.append(TextView(f"{title}; ranks have not answered yet"))
            continue
        rows = [(_ranks_of(ranks), place) for ranks, place in one.positions]
        views.append(make_table("ranks, where they stand", rows, title, wide="where they stand"))
        found: dict[str, object] = {"stacks": f"{folder}/{one.folder}/stacks.txt"}
        if one.diagnosis:
            found["flight recorder"] = one.diagnosis
        views.append(make_fields(found))
    return views


def _ranks_of(ranks: Sequence[int]) -> str:
    return (
        format_ranks(ranks) if all(rank >= 0 for rank in ranks) else f"{len(ranks)} without a rank"
    )


def _captures(status: WatchStatus) -> View:
    rows = [
        (
            one.folder,
            f"{one.step_ms:,.2f}",
            one.ranks,
            format_bytes(one.bytes),
            one.reason,
            one.differences,
        )
        for one in status.captures[-_MOST_CAPTURES:]
    ]
    more = len(status.captures) - _MOST_CAPTURES
    title = "captures kept" + (
        f" (the last {_MOST_CAPTURES} of {len(status.captures)})" if more > 0 else ""
    )
    return make_table(
        "capture, step ms, ranks, size, why, what differs", rows, title,
        right="step ms, ranks, size", wide="what differs",
    )  # fmt: skip


def suggest_commands(status: WatchStatus, folder: str) -> tuple[str, ...]:
    """The commands that tell more."""
    on_device = {one.folder for one in status.captures if one.has_device_work}
    steps = [
        f"mw hang {shlex.quote(f'{folder}/{hang.folder}/flight')} (who holds up whom)"
        for hang in status.hangs[-1:]
        if hang.num_dumps
    ]
    for slow in status.slowdowns[-1:]:
        if slow.capture and slow.reference and slow.capture in on_device:
            pair = (f"{folder}/{slow.reference}", f"{folder}/{slow.capture}")
            steps.append(shlex.join(("mw", "diff", *pair)))
        if slow.capture:
            steps.append(_look(folder, slow.capture, on_device))
    if status.exit_code is None and status.processes:
        steps.append(f"mw watch stacks {shlex.quote(folder)} (where every rank stands now)")
    if not steps and status.captures:
        steps.append(_look(folder, status.captures[-1].folder, on_device))
    if not steps and not status.processes:
        steps.append("the hook travels in PYTHONPATH: python -E, -I or -S and containers drop it")
    if not steps and status.steps and not status.fixed_interval:
        steps.append(
            "mw watch --capture-interval 100 -- … (take captures sooner than --max-overhead allows)"
        )
    return tuple(steps)


def _look(folder: str, capture: str, on_device: set[str]) -> str:
    """How to look into a capture: analyses are of devices, a host's operators are drawn."""
    if capture in on_device:
        return shlex.join(("mw", "analyze", f"{folder}/{capture}"))
    return f"open the traces in {folder}/{capture} at ui.perfetto.dev (no device was at work)"


def render_stacks(
    standings: Sequence[ProcessStacks], rows: Sequence[tuple[Sequence[int], str]]
) -> tuple[View, ...]:
    """Where ranks stand, and the main thread of one of each group."""
    if not standings:
        return (TextView("no process of this watch is there any more"),)
    views: list[View] = [
        make_table(
            "ranks, where they stand",
            [(_ranks_of(ranks), place) for ranks, place in rows],
            "where ranks stand, the largest group first",
            wide="where they stand",
        )
    ]
    seen = set()
    for one in standings:
        if one.position_text in seen or not one.stacks:
            continue
        seen.add(one.position_text)
        lines = [f"    {frame}" for frame in one.stacks[0].frames[:_MOST_FRAMES]]
        rest = len(one.stacks[0].frames) - _MOST_FRAMES
        lines += [f"    … {rest} more"] if rest > 0 else []
        who = f"rank {one.rank}" if one.rank is not None else f"pid {one.pid}"
        views.append(TextView("\n".join([f"{who}, main thread, newest call first:", *lines])))
    return tuple(views)
