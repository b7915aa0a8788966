"""`mw collective verify`: a proof, or the shortest counter-example."""

import argparse
import time
from pathlib import Path
from typing import Any

from meshwright.cli.collective.flags import (
    add_algorithm,
    build_collective,
    parse_op,
    read_ranks,
    reject_flags_with_file,
)
from meshwright.cli.collective.list import build_sample, read_ranks_per_node
from meshwright.cli.parser import add_common
from meshwright.cli.result import CommandResult, NoteView, View, make_fields, make_table
from meshwright.errors import InputError
from meshwright.policy.collective import ALGORITHMS, Collective, CollectiveProof, verify_collective
from meshwright.policy.collective.formats import read_msccl_xml
from meshwright.policy.collective.msccl.program_verification import verify_program
from meshwright.spec.file_formats import read_text
from meshwright.spec.units import format_seconds, parse_count

EXAMPLES = (
    "mw collective verify ring --ranks 4096",
    "mw collective verify --ranks 24 --per-node 8",
    "mw collective verify mine.xml",
)
_SHOWN = (
    "every output is right, each contribution is counted once, nothing is overwritten before it is "
    "read, every slot is inside its buffer, no move waits in a circle"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_algorithm(parser, optional=True)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the proof of one collective, or of the whole library."""
    if args.name is None:
        return _library(args)
    if Path(args.name).suffix == ".xml":
        reject_flags_with_file(args)
        return _program(args.name, parse_count(args.root, "--root"))
    found = build_collective(args)
    proof, seconds = _timed(found)
    data = {**_head(found), **_proof_data(proof, seconds)}
    if not proof.is_correct:
        first, *_ = proof.problems
        views: tuple[View, ...] = (
            make_fields({**_head(found), "sound": "no", "where": first.where, "what": first.what,
                   "fix": first.fix}),
        )  # fmt: skip
        return CommandResult("collective.verify/1", data, views, ("refuted",), 1)
    shown = {
        **_head(found),
        "sound": "yes",
        "proved": _SHOWN,
        "equal sums": _equal(found, proof),
        "steps": f"{proof.steps:,}",
        "moves": f"{proof.moves:,}",
        "took": format_seconds(seconds),
    }
    return CommandResult("collective.verify/1", data, (make_fields(shown),), ("sound",))


def _timed(found: Collective) -> tuple[CollectiveProof, float]:
    start = time.perf_counter()
    proof = verify_collective(found)
    return proof, time.perf_counter() - start


def _head(found: Collective) -> dict[str, Any]:
    return {"algorithm": found.name, "op": found.op, "ranks": found.ranks}


def _proof_data(proof: CollectiveProof, seconds: float) -> dict[str, Any]:
    return {
        "sound": proof.is_correct,
        "problems": [problem._asdict() for problem in proof.problems],
        "same_everywhere": proof.same_on_all_ranks,
        "steps": proof.steps,
        "moves": proof.moves,
        "seconds": seconds,
    }


def _equal(found: Collective, proof: CollectiveProof) -> str | None:
    if found.op != "all_reduce":
        return None
    return (
        "bit for bit on all ranks"
        if proof.same_on_all_ranks
        else "not shown to be equal on all ranks"
    )


def _library(args: argparse.Namespace) -> CommandResult:
    op = None if args.op is None else parse_op(args.op)
    ranks = read_ranks(args)
    per_node = read_ranks_per_node(args, ranks)
    rows: list[dict[str, Any]] = []
    for found in ALGORITHMS:
        for does in found.ops:
            if op not in (None, does):
                continue
            head = {"algorithm": found.name, "op": does, "ranks": ranks}
            try:
                built = build_sample(found, does, ranks, per_node)
            except InputError as error:
                rows.append({**head, "sound": None, "refused": error.problems[0].what})
                continue
            proof, seconds = _timed(built)
            rows.append({**head, **_proof_data(proof, seconds)})
    shown = [
        (row["algorithm"], row["op"], _word(row), row.get("steps"), row.get("moves"),
         format_seconds(row["seconds"]) if "seconds" in row else "", _remark(row))
        for row in rows
    ]  # fmt: skip
    refuted = [row for row in rows if row["sound"] is False]
    proved = sum(row["sound"] is True for row in rows)
    views = (
        make_table("algorithm, op, sound, steps, moves, took, remark", shown,
              f"{ranks} ranks in nodes of {per_node}", right="steps, moves, took",
              wide="remark"),
        NoteView(f"sound: {_SHOWN}"),
    )  # fmt: skip
    data = {"ranks": ranks, "per_node": per_node, "proved": proved, "rows": rows}
    code = 1 if refuted or not proved else 0
    return CommandResult("collective.verify_all/1", data, views, (str(proved),), code)


def _word(row: dict[str, Any]) -> str:
    return {True: "yes", False: "no", None: "–"}[row["sound"]]


def _remark(row: dict[str, Any]) -> str:
    if row["sound"] is False:
        first = row["problems"][0]
        return f"{first['where']}: {first['what']}"
    return str(row.get("refused", ""))


def _program(path: str, root: int) -> CommandResult:
    """Judge a program of MSCCL: deadlocks, races, sizes, and then the result."""
    program = read_msccl_xml(read_text(path), path, root=root)
    start = time.perf_counter()
    proof = verify_program(program)
    seconds = time.perf_counter() - start
    head = {"algorithm": program.name, "op": program.op, "ranks": len(program.ranks)}
    data = {
        **head,
        "sound": proof.is_correct,
        "problems": [problem._asdict() for problem in proof.problems],
        "thread_blocks": proof.max_thread_blocks,
        "steps": proof.steps,
        "seconds": seconds,
    }
    shown: dict[str, object] = {**head, "sound": "yes" if proof.is_correct else "no"}
    if proof.is_correct:
        shown |= {
            "proved": f"{_SHOWN}, no two thread blocks race for a slot",
            "thread blocks": f"{proof.max_thread_blocks} of a rank at most, {proof.steps:,} steps "
            f"in all",
            "took": format_seconds(seconds),
        }
    else:
        first = proof.problems[0]
        shown |= {"where": first.where, "what": first.what, "fix": first.fix}
    word = "sound" if proof.is_correct else "refuted"
    return CommandResult(
        "collective.verify/1", data, (make_fields(shown),), (word,), 0 if proof.is_correct else 1
    )
