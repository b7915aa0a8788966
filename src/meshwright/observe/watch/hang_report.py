"""How long a job may go without a step before it is asked where it stands."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import MeshwrightError
from meshwright.observe.analyze.hang import diagnose_hang
from meshwright.observe.watch.agent.stack_signal import DUMP
from meshwright.observe.watch.process_table import WatchedProcess
from meshwright.observe.watch.stack_dump import (
    ProcessStacks,
    format_stacks,
    group_by_position,
    request_stacks,
)
from meshwright.observe.watch.watch_folder import WatchFolder, write_private_text
from meshwright.spec.units import format_ranks
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import read_flight_recorder

HANG_STEP_FACTOR = 5
"""So many usual steps are waited for, where that is longer than the patience given."""

FIRST_STEP_FACTOR = 5
"""Times the patience before the first step: loading, compiling and connecting take long."""


def compute_hang_timeout_s(patience_s: float, step_s: float | None) -> float:
    """Return how long no step may end; `step_s` is the usual one, None before the first."""
    if step_s is None:
        return FIRST_STEP_FACTOR * patience_s
    return max(patience_s, HANG_STEP_FACTOR * step_s)


DUMP_TIMEOUT_S = 5.0
"""How long ranks have to dump."""


class HangReport(NamedTuple):
    """What was found, and where it is."""

    folder: str
    """Below the folder of the watch."""
    positions: tuple[tuple[tuple[int, ...], str], ...]
    diagnosis: str
    num_dumps: int


def collect_hang_report(
    folder: WatchFolder, processes: Sequence[WatchedProcess], name: str
) -> HangReport:
    """Ask everybody and keep the answers in a folder of this name."""
    home = folder.hangs / name
    home.mkdir(mode=0o700)
    since = time.time()
    _ask_for_dumps(folder, processes)
    standings = request_stacks(folder, processes)
    write_private_text(home / "stacks.txt", format_stacks(standings))
    dumps = _dumps(folder, home, len(_able_to_dump(folder, processes)), since)
    return HangReport(
        f"hangs/{name}", group_ranks_by_frame(standings), _verdict(home) if dumps else "", dumps
    )


def group_ranks_by_frame(
    standings: Sequence[ProcessStacks],
) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Where ranks stand, as plain values."""
    return tuple((tuple(ranks), place) for ranks, place in group_by_position(standings))


def _able_to_dump(folder: WatchFolder, processes: Sequence[WatchedProcess]) -> list[Path]:
    pipes = (folder.agents / f"{one.announcement.pid}.ask" for one in processes)
    return [pipe for pipe in pipes if pipe.exists()]


def _ask_for_dumps(folder: WatchFolder, processes: Sequence[WatchedProcess]) -> None:
    """By the agents' pipes and by NCCL's own, which works when Python is stuck."""
    for pipe in (*_able_to_dump(folder, processes), *folder.flight_recorder.glob("pipe_*.pipe")):
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


def _dumps(folder: WatchFolder, home: Path, expected: int, since: float) -> int:
    """Wait for the dumps and move them to where they are kept."""
    until = time.monotonic() + DUMP_TIMEOUT_S
    while True:
        found = [
            path
            for path in folder.flight_recorder.glob("rank_*")
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
        still = tuple(dump._replace(file_modified_ns=0) for dump in found.dumps)
        verdict = diagnose_hang(found._replace(dumps=still))
    except MeshwrightError:
        return ""
    if not verdict.culprits:
        return ""
    first = verdict.culprits[0]
    names = format_ranks(one.rank for one in verdict.culprits)
    return f"rank {names} ({first.confidence}): {first.reason}"
