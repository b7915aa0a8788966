"""Gathers what tells why a job stands still: stacks of all ranks, dumps of the flight recorder."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.observe.analyze.hang import diagnose
from meshwright.observe.analyze.hang.clues import ranks_text
from meshwright.observe.watch.agent.stacks import DUMP
from meshwright.observe.watch.folder import Folder, write_text
from meshwright.observe.watch.processes import Process
from meshwright.observe.watch.stacks import Standing, as_text, ask, together
from meshwright.timeline.readers.flight_recorder import read_flight_recorder

DUMP_S = 5.0
"""How long ranks have to dump."""


class Gathered(NamedTuple):
    """What was found, and where it is."""

    folder: str
    """Below the folder of the watch."""
    places: tuple[tuple[tuple[int, ...], str], ...]
    verdict: str
    num_dumps: int


def gather(folder: Folder, processes: Sequence[Process], name: str) -> Gathered:
    """Ask everybody and keep the answers in a folder of this name."""
    home = folder.stalls / name
    home.mkdir(mode=0o700)
    since = time.time()
    _ask_for_dumps(folder, processes)
    standings = ask(folder, processes)
    write_text(home / "stacks.txt", as_text(standings))
    dumps = _dumps(folder, home, len(_able_to_dump(folder, processes)), since)
    return Gathered(f"stalls/{name}", places(standings), _verdict(home) if dumps else "", dumps)


def places(standings: Sequence[Standing]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Where ranks stand, as plain values."""
    return tuple((tuple(ranks), place) for ranks, place in together(standings))


def _able_to_dump(folder: Folder, processes: Sequence[Process]) -> list[Path]:
    pipes = (folder.agents / f"{one.said.pid}.ask" for one in processes)
    return [pipe for pipe in pipes if pipe.exists()]


def _ask_for_dumps(folder: Folder, processes: Sequence[Process]) -> None:
    """By the agents' pipes and by NCCL's own, which works when Python is stuck."""
    for pipe in (*_able_to_dump(folder, processes), *folder.flight.glob("pipe_*.pipe")):
        try:
            handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            os.write(handle, DUMP)
        except OSError:
            continue
        finally:
            os.close(handle)


def _dumps(folder: Folder, home: Path, expected: int, since: float) -> int:
    """Wait for the dumps and move them to where they are kept."""
    until = time.monotonic() + DUMP_S
    while True:
        found = [
            path
            for path in folder.flight.glob("rank_*")
            if path.name[5:].isdecimal() and path.stat().st_mtime >= since - 1
        ]
        if len(found) >= expected or time.monotonic() > until:
            break
        time.sleep(0.1)
    if found:
        kept = home / "flight"
        kept.mkdir(mode=0o700)
        for path in found:
            path.replace(kept / path.name)
    return len(found)


def _verdict(home: Path) -> str:
    try:
        found = read_flight_recorder([home / "flight"])
        # That the job stands the watch has seen: how young its dumps are says nothing else.
        still = tuple(dump._replace(written_ns=0) for dump in found.dumps)
        verdict = diagnose(found._replace(dumps=still))
    except MeshwrightError:
        return ""
    if not verdict.culprits:
        return ""
    first = verdict.culprits[0]
    names = ranks_text(one.rank for one in verdict.culprits)
    return f"rank {names} ({first.certainty}): {first.reason}"
