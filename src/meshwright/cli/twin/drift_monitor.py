"""`mw twin --monitor RUN`: follow a training run, and say when its steps become slower."""

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright.cli.flags.calibration import choose_calibration
from meshwright.cli.render.safe_text import print_to_stderr
from meshwright.cli.result import CommandResult, NoteView, View, make_fields
from meshwright.errors import InputError, Problem
from meshwright.observe.finding import Finding
from meshwright.observe.hardware.nvml import NvmlDevices, open_nvml
from meshwright.observe.twin.drift.drift_detector import (
    MIN_BASELINE_VALUES,
    ExpectedStep,
    StepTimeChange,
)
from meshwright.observe.twin.drift.drift_findings import TERM_DESCRIPTIONS
from meshwright.observe.twin.drift.run_monitor import RunMonitor, RunStatus
from meshwright.observe.twin.drift.run_steps import (
    find_cluster_with_gpu,
    predict_expected_step,
    read_run_config,
    read_run_work,
    read_sessions,
)
from meshwright.run.train.run_folder.run_folder import is_locked
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.serialization import decode
from meshwright.spec.units import format_seconds

POLL_S = 0.5
IDLE_TIMEOUT_S = 3.0
"""Without a row, before it is asked whether anybody still trains."""
MAX_SHOWN = 5


def add_drift(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("a run of mw train")
    group.add_argument(
        "--monitor", metavar="RUN",
        help="follow the steps of a run's folder, in place of running any; one that has ended is "
        "judged whole",
    )  # fmt: skip
    group.add_argument(
        "--once", action="store_true", help="judge the steps that are there, and follow no more"
    )
    group.add_argument(
        "--cluster", metavar="NAME", help="where it runs (default: any with the device it noted)"
    )


class _Predicted(NamedTuple):
    """The step as predicted, or why there is none."""

    expected: ExpectedStep | None
    words: str
    calibration: dict[str, Any] | None = None


def run_drift(args: argparse.Namespace) -> CommandResult:
    """Follow a run to its end, or judge what is there."""
    given = {"MODEL": args.model, "--layout": args.layouts, "--save": args.save,
             "--precision": args.precision, "--seq-len": args.seq_len,
             "--num-sequences": args.num_sequences}  # fmt: skip
    wrong = [name for name, value in given.items() if value]
    if wrong:
        fix = "leave it out: the run says what it trains"
        raise InputError([Problem(name, "cannot be given with --monitor", fix) for name in wrong])
    folder = Path(args.monitor)
    config = read_run_config(folder)
    predicted = _predict(args, folder, config)
    ranks = decode(Layout, config.get("layout", {}), "layout").gpus
    watch = RunMonitor(folder, predicted.expected, ranks)
    running = is_locked(folder)
    if running and not args.once:
        with open_nvml() as gpus:
            _follow(watch, gpus, quiet=args.quiet or args.json)
        running = is_locked(folder)
    else:
        watch.poll()
    return _answer(watch.summarize(), predicted, str(folder), running=running, check=args.check)


def _predict(args: argparse.Namespace, folder: Path, config: dict[str, Any]) -> _Predicted:
    sessions = read_sessions(folder)
    name = sessions[-1].gpu if sessions else None
    if args.cluster is None and name is None:
        device = sessions[-1].device if sessions else "the device"
        return _Predicted(None, f"none: {device} is in no catalog, or the run did not note it")
    gpu = catalog.get_cluster(args.cluster).gpu if args.cluster else catalog.get_gpu(str(name))
    used = choose_calibration(args, gpu)
    if gpu.kind == "cpu" and used.calibration is None:
        what = "none: nobody knows what cores do without a calibration (mw bench, mw calibrate)"
        return _Predicted(None, what)
    cluster = find_cluster_with_gpu(gpu)
    known = (
        cluster.name if cluster.name in catalog.list_clusters() and cluster.gpu == gpu else cluster
    )
    expected = predict_expected_step(read_run_work(config, args.cluster or known), used.calibration)
    words = (
        f"{format_seconds(expected.step_s)}, between {format_seconds(expected.low_s)} and "
        f"{format_seconds(expected.high_s)}; {used.description}"
    )
    return _Predicted(expected, words, used.data)


def _follow(watch: RunMonitor, gpus: NvmlDevices | None, *, quiet: bool) -> None:
    """Read what comes until nobody trains any more, or the user has seen enough."""
    heard_s = time.monotonic()
    try:
        while True:
            count, found = watch.poll()
            for change in found if not quiet else ():
                print_to_stderr(format_change(change))
            now_s = time.monotonic()
            heard_s = now_s if count else heard_s
            if now_s - heard_s > IDLE_TIMEOUT_S and not is_locked(watch.folder):
                watch.poll()
                return
            if gpus is not None:
                watch.add_hardware_sample(time.time(), gpus.sample())
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return


def format_change(change: StepTimeChange) -> str:
    """Return a change in a line."""
    moved = change.largest_change
    why = "" if moved is None else f"; {TERM_DESCRIPTIONS[moved.term]} {_signed(moved.increase_s)}"
    sizes = f"{format_seconds(change.before_s)} → {format_seconds(change.after_s)}"
    what = {
        "off_prediction": f"off the prediction, {sizes}",
        "slower": f"slower since step {change.since_step:,}, {sizes} "
        f"({100 * change.relative_increase:+.1f} %)",
        "faster": f"faster since step {change.since_step:,}, {sizes} "
        f"({100 * change.relative_increase:+.1f} %)",
        "recovered": f"as before the slowdown again, {sizes}",
    }[change.kind]
    return f"step {change.step:,}: {what}{why}"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"


def _answer(
    told: RunStatus, predicted: _Predicted, run: str, *, running: bool, check: bool
) -> CommandResult:
    expected = predicted.expected
    data = {
        "run": run,
        "running": running,
        "last_step": told.last_step,
        "num_steps": told.num_steps,
        "baseline_s": told.baseline_s,
        "predicted": None if expected is None else expected._asdict(),
        "costs": predicted.words,
        "calibration": predicted.calibration,
        "has_slowdown": told.slowdown is not None,
        "changes": [_data(change) for change in told.changes],
        "findings": [msgspec.to_builtins(one) for one in told.findings],
    }
    summary = make_fields(
        {
            "run": run,
            "steps": f"{told.last_step:,}, {told.num_steps:,} of them judged",
            "predicted": predicted.words,
            "usual": _usual(told, expected),
            "now": _now(told),
        }
    )
    views: list[View] = [summary, *map(_shown, told.findings[-MAX_SHOWN:])]
    hidden = len(told.findings) - MAX_SHOWN
    if hidden > 0:
        views.append(NoteView(f"{hidden} earlier findings are in --json"))
    if told.baseline_s is None:
        what = (
            f"too few steps to tell a pace: it takes {MIN_BASELINE_VALUES}, short ones joined "
            f"to blocks"
        )
        views.append(NoteView(what))
    quiet = tuple(format_change(change) for change in told.changes)
    return CommandResult(
        "twin-monitor/2", data, tuple(views), quiet, 1 if check and told.findings else 0
    )


def _usual(told: RunStatus, expected: ExpectedStep | None) -> str:
    if told.baseline_s is None:
        return "not settled yet"
    text = format_seconds(told.baseline_s)
    if expected is None:
        return text
    off = 100 * (told.baseline_s / expected.step_s - 1)
    where = "within" if expected.is_within_interval(told.baseline_s) else "outside"
    return f"{text}, {off:+.1f} % of the prediction, {where} its band"


def _now(told: RunStatus) -> str:
    slow = told.slowdown
    if slow is None:
        return "no slowdown" if told.baseline_s is not None else ""
    return f"slower since step {slow.since_step:,}: {format_seconds(slow.before_s)} before"


def _shown(found: Finding) -> View:
    cost = None if found.cost_ms_per_step is None else f"{found.cost_ms_per_step:.3g} ms per step"
    rows = {
        found.name: found.title,
        "evidence": "; ".join(found.evidence),
        "ranks": ", ".join(map(str, found.ranks[:16])) if len(found.ranks) > 1 else "",
        "cost": cost,
        "remedy": found.remedy,
    }
    return make_fields(rows)


def _data(change: StepTimeChange) -> dict[str, Any]:
    moved = change.largest_change
    return {
        **change._asdict(),
        "terms": [one._asdict() for one in change.terms],
        "relative_increase": change.relative_increase,
        "largest_change": None if moved is None else moved.term,
    }
