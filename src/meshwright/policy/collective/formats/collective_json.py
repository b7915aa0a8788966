"""Our own file of a collective: JSON that states every field of the value, one move per line.

{"format": "meshwright.collective/1", "name": …, "op": …, "ranks": …, "chunks": …, "slots": …,
 "sweeps": [{"span": …, "shift": {…}, "moves": [
   [src, dst, src_slot, dst_slot, count, adds, channel, phase], …]}]}

Fields that have a default may be left out. What is read is a collective, not a proof: `verify`
judges what it does.
"""

import json
from typing import Any, Literal

import msgspec
import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import (
    MOVE_COLUMNS,
    ChunkMoves,
    Collective,
    CollectiveOp,
    Sweep,
    SweepShift,
)
from meshwright.policy.collective.contract import find_shape_problems
from meshwright.policy.collective.sweep_ranges import MAX_COLUMN_VALUE
from meshwright.spec.file_formats import parse
from meshwright.spec.serialization import decode, encode

FORMAT = "meshwright.collective/1"

Row = tuple[int, int, int, int, int, int, int, int]


class SweepJson(msgspec.Struct, frozen=True, kw_only=True):
    """A sweep as the file states it."""

    moves: tuple[Row, ...]
    span: int = 1
    shift: SweepShift = SweepShift()


class CollectiveJson(msgspec.Struct, frozen=True, kw_only=True):
    """A collective as the file states it."""

    format: Literal["meshwright.collective/1"]
    name: str
    op: CollectiveOp
    ranks: int
    chunks: int
    slots: int
    sweeps: tuple[SweepJson, ...]
    root: int = 0
    switches: tuple[str, ...] = ()
    counts: tuple[tuple[int, ...], ...] = ()
    peers: tuple[int, ...] = ()


def write_collective_json(collective: Collective) -> str:
    """Return a collective as the text of a file; one that could not be read again is refused."""
    problems = find_shape_problems(collective)
    if problems:
        raise InputError(problems)
    head: dict[str, Any] = {
        "format": FORMAT,
        "name": collective.name,
        "op": collective.op,
        "ranks": collective.ranks,
        "chunks": collective.chunks,
        "slots": collective.slots,
        "root": collective.root,
        "switches": list(collective.switches),
        "counts": [list(row) for row in collective.counts],
        "peers": list(collective.peers),
    }
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    sweeps = ",\n".join(_sweep_text(sweep) for sweep in collective.sweeps)
    lines.append(f' "sweeps": [\n{sweeps}\n ]' if sweeps else ' "sweeps": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _sweep_text(sweep: Sweep) -> str:
    rows = ",\n".join(f"   {row}" for row in sweep.moves.table.tolist())
    shift = json.dumps(encode(sweep.shift))
    moves = f"[\n{rows}\n  ]" if rows else "[]"
    return f'  {{"span": {sweep.span}, "shift": {shift}, "moves": {moves}}}'


def read_collective_json(text: str, where: str = "collective.json") -> Collective:
    """Return the collective that a file states, or raise all that is wrong with its fields."""
    file = decode(CollectiveJson, parse(text, ".json", where), f"{where}: ")
    problems: list[Problem] = []
    for number, sweep in enumerate(file.sweeps):
        problems += _number_problems(sweep, f"{where}: sweeps[{number}]")
    if problems:
        raise InputError(problems)
    collective = Collective(
        name=file.name,
        op=file.op,
        ranks=file.ranks,
        chunks=file.chunks,
        slots=file.slots,
        sweeps=tuple(_sweep(sweep) for sweep in file.sweeps),
        root=file.root,
        switches=file.switches,
        counts=file.counts,
        peers=file.peers,
    )
    shape = find_shape_problems(collective)
    if shape:
        raise InputError([Problem(f"{where}: {at}", what, fix) for at, what, fix in shape])
    return collective


def _sweep(sweep: SweepJson) -> Sweep:
    table = np.array(sweep.moves, dtype=np.int32).reshape(-1, len(MOVE_COLUMNS))
    return Sweep(moves=ChunkMoves(table), span=sweep.span, shift=sweep.shift)


def _number_problems(sweep: SweepJson, at: str) -> list[Problem]:
    """Return the first row with a number that no column of moves can hold."""
    for number, row in enumerate(sweep.moves):
        if min(row) < 0 or max(row) > MAX_COLUMN_VALUE:
            column = next(
                index for index, value in enumerate(row) if not 0 <= value <= MAX_COLUMN_VALUE
            )
            what = f"{MOVE_COLUMNS[column]} {row[column]}"
            return [Problem(f"{at}.moves[{number}]", what, f"use 0 to {MAX_COLUMN_VALUE}")]
    return []
