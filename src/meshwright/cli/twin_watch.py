"""`mw twin --watch RUN`: follow a training run, and say when its steps become slower."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright.cli.answer import Answer, Note, View, facts
from meshwright.cli.calibrations import used_for
from meshwright.errors import InputError, Problem
from meshwright.observe.finding import Finding
from meshwright.observe.twin.drift import SETTLED, Change, Expected
from meshwright.observe.twin.drift_findings import WORDS
from meshwright.observe.twin.drift_run import (
    cluster_with,
    config_of,
    expected_of,
    sittings_of,
    work_of,
)
from meshwright.observe.watch.gpus import Gpus, open_gpus
from meshwright.observe.watch.run_watch import RunWatch, Told
from meshwright.run.train.run_folder import in_use
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.read import read
from meshwright.spec.units import format_seconds

LOOK_S = 0.5
QUIET_S = 3.0
"""Without a row, before it is asked whether anybody still trains."""
MOST_SHOWN = 5


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("a run of mw train")
    group.add_argument(
        "--watch", metavar="RUN",
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

    expected: Expected | None
    words: str
    calibration: dict[str, Any] | None = None


def run_watch(args: argparse.Namespace) -> Answer:
    """Follow a run to its end, or judge what is there."""
    given = {"MODEL": args.model, "--layout": args.layouts, "--save": args.save,
             "--precision": args.precision, "--sequence": args.sequence,
             "--sequences": args.sequences}  # fmt: skip
    wrong = [name for name, value in given.items() if value]
    if wrong:
        fix = "leave it out: the run says what it trains"
        raise InputError([Problem(name, "cannot be given with --watch", fix) for name in wrong])
    folder = Path(args.watch)
    config = config_of(folder)
    predicted = _predict(args, folder, config)
    ranks = read(Layout, config.get("layout", {}), "layout").gpus
    watch = RunWatch(folder, predicted.expected, ranks)
    running = in_use(folder)
    if running and not args.once:
        with open_gpus() as gpus:
            _follow(watch, gpus, quiet=args.quiet or args.json)
        running = in_use(folder)
    else:
        watch.read()
    return _answer(watch.told(), predicted, str(folder), running=running, check=args.check)


def _predict(args: argparse.Namespace, folder: Path, config: dict[str, Any]) -> _Predicted:
    sittings = sittings_of(folder)
    name = sittings[-1].gpu if sittings else None
    if args.cluster is None and name is None:
        device = sittings[-1].device if sittings else "the device"
        return _Predicted(None, f"none: {device} is in no catalog, or the run did not note it")
    gpu = catalog.cluster(args.cluster).gpu if args.cluster else catalog.gpu(str(name))
    used = used_for(args, gpu)
    if gpu.kind == "cpu" and used.calibration is None:
        what = "none: nobody knows what cores do without a calibration (mw bench, mw calibrate)"
        return _Predicted(None, what)
    cluster = cluster_with(gpu)
    known = cluster.name if cluster.name in catalog.clusters() and cluster.gpu == gpu else cluster
    expected = expected_of(work_of(config, args.cluster or known), used.calibration)
    words = (
        f"{format_seconds(expected.step_s)}, between {format_seconds(expected.low_s)} and "
        f"{format_seconds(expected.high_s)}; {used.words}"
    )
    return _Predicted(expected, words, used.data)


def _follow(watch: RunWatch, gpus: Gpus | None, *, quiet: bool) -> None:
    """Read what comes until nobody trains any more, or the user has seen enough."""
    heard_s = time.monotonic()
    try:
        while True:
            count, found = watch.read()
            for change in found if not quiet else ():
                sys.stderr.write(f"{said(change)}\n")
                sys.stderr.flush()
            now_s = time.monotonic()
            heard_s = now_s if count else heard_s
            if now_s - heard_s > QUIET_S and not in_use(watch.folder):
                watch.read()
                return
            if gpus is not None:
                watch.sample(time.time(), gpus.sample())
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        return


def said(change: Change) -> str:
    """Return a change in a line."""
    moved = change.moved
    why = "" if moved is None else f"; {WORDS[moved.term]} {_signed(moved.rise_s)}"
    sizes = f"{format_seconds(change.before_s)} → {format_seconds(change.after_s)}"
    what = {
        "away": f"away from the prediction, {sizes}",
        "slower": f"slower since step {change.since:,}, {sizes} ({100 * change.rise:+.1f} %)",
        "faster": f"faster since step {change.since:,}, {sizes} ({100 * change.rise:+.1f} %)",
        "recovered": f"as before the slowdown again, {sizes}",
    }[change.kind]
    return f"step {change.step:,}: {what}{why}"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"


def _answer(told: Told, predicted: _Predicted, run: str, *, running: bool, check: bool) -> Answer:
    expected = predicted.expected
    data = {
        "run": run,
        "running": running,
        "steps": told.last,
        "judged": told.steps,
        "usual_s": told.usual_s,
        "predicted": None if expected is None else expected._asdict(),
        "costs": predicted.words,
        "calibration": predicted.calibration,
        "slower": told.slower is not None,
        "changes": [_data(change) for change in told.changes],
        "findings": [msgspec.to_builtins(one) for one in told.findings],
    }
    summary = facts(
        {
            "run": run,
            "steps": f"{told.last:,}, {told.steps:,} of them judged",
            "predicted": predicted.words,
            "usual": _usual(told, expected),
            "now": _now(told),
        }
    )
    views: list[View] = [summary, *map(_shown, told.findings[-MOST_SHOWN:])]
    hidden = len(told.findings) - MOST_SHOWN
    if hidden > 0:
        views.append(Note(f"{hidden} earlier findings are in --json"))
    if told.usual_s is None:
        what = f"too few steps to tell a pace: it takes {SETTLED}, short ones joined to blocks"
        views.append(Note(what))
    quiet = tuple(said(change) for change in told.changes)
    return Answer("twin-watch/1", data, tuple(views), quiet, 1 if check and told.findings else 0)


def _usual(told: Told, expected: Expected | None) -> str:
    if told.usual_s is None:
        return "not settled yet"
    text = format_seconds(told.usual_s)
    if expected is None:
        return text
    off = 100 * (told.usual_s / expected.step_s - 1)
    where = "within" if expected.holds(told.usual_s) else "outside"
    return f"{text}, {off:+.1f} % of the prediction, {where} its band"


def _now(told: Told) -> str:
    slow = told.slower
    if slow is None:
        return "no slowdown" if told.usual_s is not None else ""
    return f"slower since step {slow.since:,}: {format_seconds(slow.before_s)} before"


def _shown(found: Finding) -> View:
    cost = None if found.cost_ms_per_step is None else f"{found.cost_ms_per_step:.3g} ms per step"
    rows = {
        found.name: found.title,
        "evidence": "; ".join(found.evidence),
        "ranks": ", ".join(map(str, found.ranks[:16])) if len(found.ranks) > 1 else "",
        "cost": cost,
        "remedy": found.remedy,
    }
    return facts(rows)


def _data(change: Change) -> dict[str, Any]:
    moved = change.moved
    return {
        **change._asdict(),
        "terms": [one._asdict() for one in change.terms],
        "rise": change.rise,
        "moved": None if moved is None else moved.term,
    }
