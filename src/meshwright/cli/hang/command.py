"""`mw hang DUMPS…`: which ranks hung a job, told from the flight recorder's dumps."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.cli.parser import add_common
from meshwright.cli.result import CommandResult, NoteView, TextView, View, make_fields, make_table
from meshwright.errors import InputError
from meshwright.observe.analyze.hang import (
    BlockedOperation,
    CulpritRank,
    DumpDiagnosis,
    diagnose_hang,
)
from meshwright.spec.units import format_quantity, format_ranks
from meshwright.timeline.readers.flight_recorder.dump_records import DumpSet
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import read_flight_recorder
from meshwright.timeline.readers.trace_formats import check_format

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


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the culprits, ranked; exit code 1 where the dumps show a hang."""
    dumps = _read(args.dumps)
    verdict = diagnose_hang(dumps)
    views: list[View] = [make_fields(_summary(verdict)), *_screen(verdict)]
    views += [NoteView(f"rank {rank}: {why}") for rank, why in sorted(dumps.damaged.items())]
    views += [NoteView(note) for note in dumps.notes[:_SHOWN]]
    quiet = tuple(str(each.rank) for each in verdict.culprits)
    return CommandResult(
        "hang/2", _data(verdict, dumps.notes), tuple(views), quiet, 1 if verdict.culprits else 0
    )


def _read(paths: Sequence[str]) -> DumpSet:
    """The dumps; where there is none, files of another kind are called by their names."""
    try:
        return read_flight_recorder(paths)
    except InputError:
        others = [check_format(Path(path), "mw hang") for path in paths]
        known = [other for other in others if other is not None]
        if not known:
            raise
        raise InputError(known) from None


def _summary(verdict: DumpDiagnosis) -> dict[str, str]:
    read = len(verdict.world) - len(verdict.ranks_without_dump)
    found = {"dumps": f"{read} of {len(verdict.world)} ranks"}
    if verdict.ranks_without_dump:
        found["without a dump"] = f"rank {format_ranks(verdict.ranks_without_dump)}"
    if not verdict.culprits:
        return found | {"verdict": _healthy(verdict)}
    names = format_ranks(each.rank for each in verdict.culprits)
    found["culprits"] = f"rank {names}" if len(verdict.culprits) == 1 else f"ranks {names}"
    if all(each.confidence == "possible" for each in verdict.culprits):
        found["culprits"] += " together: the dumps do not tell them apart"
    if verdict.waiting_ranks:
        waiting = format_quantity(len(verdict.waiting_ranks), "rank only waits", "ranks only wait")
        found["consequences"] = f"{waiting}: {format_ranks(verdict.waiting_ranks)}"
    return found


def _healthy(verdict: DumpDiagnosis) -> str:
    motion = verdict.pending_age
    if motion is None:
        return "no rank waits for another: these dumps show no hang"
    return (
        f"no hang: the job was moving. When it was dumped, its oldest unfinished operation was "
        f"{motion.pending_ns / 1e9:.1f} s old; nine of ten that ended took up to "
        f"{motion.typical_ns / 1e9:.1f} s. If it stands still, dump it again later"
    )


def _screen(verdict: DumpDiagnosis) -> list[View]:
    if not verdict.culprits:
        return []
    views: list[View] = [_named("culprits", verdict.culprits)]
    if verdict.suspects:
        views.append(_named("look at these next", verdict.suspects))
    views.append(_waits(verdict.blocked_operations))
    source = next((each.source_line for each in verdict.culprits if each.source_line), "") or next(
        (one.source_line for one in verdict.blocked_operations if one.source_line), ""
    )
    if source:
        views.append(make_fields({"source": source}))
    steps = list(dict.fromkeys(each.next_step for each in verdict.culprits))[:3]
    views.append(TextView("\n".join(f"next: {step}" for step in steps)))
    return views


def _named(title: str, those: Sequence[CulpritRank]) -> View:
    rows: list[tuple[object, ...]] = [
        (each.rank, each.confidence, each.num_waiting, each.reason) for each in those[:_SHOWN]
    ]
    if len(those) > _SHOWN:
        rest = format_ranks(each.rank for each in those[_SHOWN:])
        rows.append(("", "", "", f"and ranks {rest}, for like reasons"))
    return make_table(
        "rank, certainty, hold up, why", rows, title, right="rank, hold up", wide="why"
    )


def _waits(operations: Sequence[BlockedOperation]) -> View:
    rows = [
        (
            one.operation,
            format_ranks(one.waiting_ranks),
            format_ranks(one.missing_ranks),
            "consequence" if one.is_consequence else "cause",
        )
        for one in operations[:_SHOWN]
    ]
    more = f" (the first {_SHOWN} of {len(operations)})" if len(operations) > _SHOWN else ""
    return make_table(
        "operation, waiting, missing, is", rows, f"what ranks wait for{more}", wide="operation"
    )


def _data(verdict: DumpDiagnosis, notes: Sequence[str]) -> dict[str, Any]:
    return {
        "culprits": [each._asdict() for each in verdict.culprits],
        "suspects": [each._asdict() for each in verdict.suspects],
        "blocked_operations": [each._asdict() for each in verdict.blocked_operations],
        "world": len(verdict.world),
        "absent": list(verdict.ranks_without_dump),
        "waiting": list(verdict.waiting_ranks),
        "waited_s": verdict.pending_age.pending_ns / 1e9 if verdict.pending_age else None,
        "notes": list(notes),
    }
