"""`mw collective verify`: a proof, or the shortest counter-example."""

import argparse
import time
from pathlib import Path
from typing import Any

from meshwright.cli.answer import Answer, Note, View, facts, table
from meshwright.cli.collective_list import node_of, sample
from meshwright.cli.collective_source import (
    add_algorithm,
    collective_of,
    op_of,
    ranks_of,
    refuse_beside_file,
)
from meshwright.cli.parser import add_common
from meshwright.errors import InputError
from meshwright.policy.collective import ALGORITHMS, Collective, Proof, verify
from meshwright.policy.collective.formats import read_msccl_xml
from meshwright.policy.collective.threadblocks.soundness import verify_lanes
from meshwright.spec.files import read_text
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


def run(args: argparse.Namespace) -> Answer:
    """Answer with the proof of one collective, or of the whole library."""
    if args.name is None:
        return _library(args)
    if Path(args.name).suffix == ".xml":
        refuse_beside_file(args)
        return _program(args.name, parse_count(args.root, "--root"))
    found = collective_of(args)
    proof, seconds = _timed(found)
    data = {**_head(found), **_proof_data(proof, seconds)}
    if not proof.sound:
        first, *_ = proof.problems
        views: tuple[View, ...] = (
            facts({**_head(found), "sound": "no", "where": first.where, "what": first.what,
                   "fix": first.fix}),
        )  # fmt: skip
        return Answer("collective.verify/1", data, views, ("refuted",), 1)
    shown = {
        **_head(found),
        "sound": "yes",
        "proved": _SHOWN,
        "equal sums": _equal(found, proof),
        "steps": f"{proof.steps:,}",
        "moves": f"{proof.moves:,}",
        "took": format_seconds(seconds),
    }
    return Answer("collective.verify/1", data, (facts(shown),), ("sound",))


def _timed(found: Collective) -> tuple[Proof, float]:
    start = time.perf_counter()
    proof = verify(found)
    return proof, time.perf_counter() - start


def _head(found: Collective) -> dict[str, Any]:
    return {"algorithm": found.name, "op": found.op, "ranks": found.ranks}


def _proof_data(proof: Proof, seconds: float) -> dict[str, Any]:
    return {
        "sound": proof.sound,
        "problems": [problem._asdict() for problem in proof.problems],
        "same_everywhere": proof.same_everywhere,
        "steps": proof.steps,
        "moves": proof.moves,
        "seconds": seconds,
    }


def _equal(found: Collective, proof: Proof) -> str | None:
    if found.op != "all_reduce":
        return None
    return (
        "bit for bit on all ranks"
        if proof.same_everywhere
        else "not shown to be equal on all ranks"
    )


def _library(args: argparse.Namespace) -> Answer:
    op = None if args.op is None else op_of(args.op)
    ranks = ranks_of(args)
    per_node = node_of(args, ranks)
    rows: list[dict[str, Any]] = []
    for found in ALGORITHMS:
        for does in found.ops:
            if op not in (None, does):
                continue
            head = {"algorithm": found.name, "op": does, "ranks": ranks}
            try:
                built = sample(found, does, ranks, per_node)
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
        table("algorithm, op, sound, steps, moves, took, remark", shown,
              f"{ranks} ranks in nodes of {per_node}", right="steps, moves, took",
              wide="remark"),
        Note(f"sound: {_SHOWN}"),
    )  # fmt: skip
    data = {"ranks": ranks, "per_node": per_node, "proved": proved, "rows": rows}
    code = 1 if refuted or not proved else 0
    return Answer("collective.verify_all/1", data, views, (str(proved),), code)


def _word(row: dict[str, Any]) -> str:
    return {True: "yes", False: "no", None: "–"}[row["sound"]]


def _remark(row: dict[str, Any]) -> str:
    if row["sound"] is False:
        first = row["problems"][0]
        return f"{first['where']}: {first['what']}"
    return str(row.get("refused", ""))


def _program(path: str, root: int) -> Answer:
    """Judge a program of MSCCL: deadlocks, races, sizes, and then the result."""
    program = read_msccl_xml(read_text(path), path, root=root)
    start = time.perf_counter()
    proof = verify_lanes(program)
    seconds = time.perf_counter() - start
    head = {"algorithm": program.name, "op": program.op, "ranks": len(program.ranks)}
    data = {
        **head,
        "sound": proof.sound,
        "problems": [problem._asdict() for problem in proof.problems],
        "thread_blocks": proof.lanes,
        "steps": proof.steps,
        "seconds": seconds,
    }
    shown: dict[str, object] = {**head, "sound": "yes" if proof.sound else "no"}
    if proof.sound:
        shown |= {
            "proved": f"{_SHOWN}, no two thread blocks race for a slot",
            "thread blocks": f"{proof.lanes} of a rank at most, {proof.steps:,} steps in all",
            "took": format_seconds(seconds),
        }
    else:
        first = proof.problems[0]
        shown |= {"where": first.where, "what": first.what, "fix": first.fix}
    word = "sound" if proof.sound else "refuted"
    return Answer("collective.verify/1", data, (facts(shown),), (word,), 0 if proof.sound else 1)
