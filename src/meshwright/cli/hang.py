"""`mw hang DUMPS…`: which ranks hung a job, told from the flight recorder's dumps."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.cli.answer import Answer, Note, Text, View, facts, table
from meshwright.cli.parser import add_common
from meshwright.errors import InputError
from meshwright.observe.analyze.hang import Culprit, Stall, Verdict, diagnose
from meshwright.observe.analyze.hang.clues import ranks_text
from meshwright.spec.units import format_some
from meshwright.timeline.readers.flight_recorder import read_flight_recorder
from meshwright.timeline.readers.flight_records import Dumps
from meshwright.timeline.readers.trace_formats import mistaken

EXAMPLES = ("mw hang /tmp/nccl_trace_rank_*", "mw hang dumps/ --json")
_SHOWN = 8


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw hang DUMPS… [flags]"
    parser.add_argument(
        "dumps", nargs="+", metavar="DUMPS",
        help="dumps of all ranks (pickle or JSON; names end with the rank), or their folder",
    )  # fmt: skip
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with the culprits, ranked; exit code 1 where the dumps show a hang."""
    dumps = _read(args.dumps)
    verdict = diagnose(dumps)
    views: list[View] = [facts(_summary(verdict)), *_screen(verdict)]
    views += [Note(f"rank {rank}: {why}") for rank, why in sorted(dumps.damaged.items())]
    views += [Note(note) for note in dumps.notes[:_SHOWN]]
    quiet = tuple(str(each.rank) for each in verdict.culprits)
    return Answer(
        "hang/1", _data(verdict, dumps.notes), tuple(views), quiet, 1 if verdict.culprits else 0
    )


def _read(paths: Sequence[str]) -> Dumps:
    """The dumps; where there is none, files of another kind are called by their names."""
    try:
        return read_flight_recorder(paths)
    except InputError:
        others = [mistaken(Path(path), "mw hang") for path in paths]
        known = [other for other in others if other is not None]
        if not known:
            raise
        raise InputError(known) from None


def _summary(verdict: Verdict) -> dict[str, str]:
    read = len(verdict.world) - len(verdict.absent)
    found = {"dumps": f"{read} of {len(verdict.world)} ranks"}
    if verdict.absent:
        found["without a dump"] = f"rank {ranks_text(verdict.absent)}"
    if not verdict.culprits:
        return found | {"verdict": _healthy(verdict)}
    names = ranks_text(each.rank for each in verdict.culprits)
    found["culprits"] = f"rank {names}" if len(verdict.culprits) == 1 else f"ranks {names}"
    if all(each.certainty == "possible" for each in verdict.culprits):
        found["culprits"] += " together: the dumps do not tell them apart"
    if verdict.waiting:
        waiting = format_some(len(verdict.waiting), "rank only waits", "ranks only wait")
        found["consequences"] = f"{waiting}: {ranks_text(verdict.waiting)}"
    return found


def _healthy(verdict: Verdict) -> str:
    motion = verdict.motion
    if motion is None:
        return "no rank waits for another: these dumps show no hang"
    return (
        f"no hang: the job was moving. When it was dumped, its oldest unfinished operation was "
        f"{motion.waited_ns / 1e9:.1f} s old; nine of ten that ended took up to "
        f"{motion.usual_ns / 1e9:.1f} s. If it stands still, dump it again later"
    )


def _screen(verdict: Verdict) -> list[View]:
    if not verdict.culprits:
        return []
    views: list[View] = [_named("culprits", verdict.culprits)]
    if verdict.suspects:
        views.append(_named("look at these next", verdict.suspects))
    views.append(_waits(verdict.stalls))
    source = next((each.source for each in verdict.culprits if each.source), "") or next(
        (stall.source for stall in verdict.stalls if stall.source), ""
    )
    if source:
        views.append(facts({"source": source}))
    steps = list(dict.fromkeys(each.next for each in verdict.culprits))[:3]
    views.append(Text("\n".join(f"next: {step}" for step in steps)))
    return views


def _named(title: str, those: Sequence[Culprit]) -> View:
    rows: list[tuple[object, ...]] = [
        (each.rank, each.certainty, each.waiting, each.reason) for each in those[:_SHOWN]
    ]
    if len(those) > _SHOWN:
        rest = ranks_text(each.rank for each in those[_SHOWN:])
        rows.append(("", "", "", f"and ranks {rest}, for like reasons"))
    return table("rank, certainty, hold up, why", rows, title, right="rank, hold up", wide="why")


def _waits(stalls: Sequence[Stall]) -> View:
    rows = [
        (
            stall.operation,
            ranks_text(stall.waiting),
            ranks_text(stall.missing),
            "consequence" if stall.consequence else "cause",
        )
        for stall in stalls[:_SHOWN]
    ]
    more = f" (the first {_SHOWN} of {len(stalls)})" if len(stalls) > _SHOWN else ""
    return table(
        "operation, waiting, missing, is", rows, f"what ranks wait for{more}", wide="operation"
    )


def _data(verdict: Verdict, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "culprits": [each._asdict() for each in verdict.culprits],
        "suspects": [each._asdict() for each in verdict.suspects],
        "stalls": [each._asdict() for each in verdict.stalls],
        "world": len(verdict.world),
        "absent": list(verdict.absent),
        "waiting": list(verdict.waiting),
        "waited_s": verdict.motion.waited_ns / 1e9 if verdict.motion else None,
        "notes": list(notes),
    }
