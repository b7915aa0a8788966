"""`choose` and `load_into`: the newest checkpoint that is whole, read into tensors.

A load happens in this order, each part on all ranks before the next: find one that is whole,
compare its names, shapes and types with what is asked for, read. Until then nothing is changed.
"""

import warnings
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.run.train.checkpoint.asking import asked_wrongly, reads_of
from meshwright.run.train.checkpoint.fetch import fetch
from meshwright.run.train.checkpoint.folder import Folder, Found, read_record
from meshwright.run.train.checkpoint.given import Tensors, placed_all
from meshwright.run.train.checkpoint.peers import Peers
from meshwright.run.train.checkpoint.recoding import recode, recodings
from meshwright.run.train.checkpoint.record import decode_extra
from meshwright.run.train.checkpoint.settings import CheckpointSettings
from meshwright.run.train.checkpoint.verify import verify_files

Leftover = Literal["refuse", "leave"]
"""What to do with saved tensors that no rank asks for."""


class Loaded(NamedTuple):
    """What a load brought back beside the tensors."""

    step: int
    extra: dict[str, Any]
    found: Found


def choose(folder: Folder, step: int | None, peers: Peers, settings: CheckpointSettings) -> Found:
    """Find the newest save, or the newest of a step, that is whole; all ranks get the same."""
    present = peers.combine(lambda: None, lambda _: folder.found())
    wanted = [one for one in reversed(present) if step is None or one.step == step]
    if not wanted:
        raise InputError([_absent(folder.path, step, present)])
    damaged: dict[Path, list[Problem]] = {}
    for found in wanted:
        problems = _damage(found, peers, settings)
        if not problems:
            if peers.first:
                _tell(damaged)
            return found
        damaged[found.path] = problems
        if step is not None or settings.damaged == "refuse":
            break
    raise DamagedFile(problem for problems in damaged.values() for problem in problems)


def load_into(
    found: Found,
    into: Tensors,
    leftover: Leftover,
    peers: Peers,
    settings: CheckpointSettings,
) -> Loaded:
    """Read a checkpoint into tensors that fit it; anything else is refused before it starts."""
    record = read_record(found.path)
    placed = placed_all(into)
    anew = recodings(record, found.path, into, placed)
    for each in anew:
        del placed[each.name]
    problems = asked_wrongly(record, placed, anew, leftover == "refuse", peers)
    if problems:
        raise InputError(problems)
    with peers.reading(sum(each.tensor.nbytes for each in placed.values())):
        fetch(found.path, list(reads_of(record, placed)), settings.threads)
        for each in anew:
            recode(record, found.path, each, settings.threads)
    return Loaded(record.step, decode_extra(record), found)


def _damage(found: Found, peers: Peers, settings: CheckpointSettings) -> list[Problem]:
    """Say what is wrong with a checkpoint; each rank reads its share of the files."""

    def share() -> list[Problem]:
        try:
            record = read_record(found.path)
        except DamagedFile as error:
            return list(error.problems)
        if settings.verify == "sizes":
            return []
        files = record.files[peers.rank :: peers.ranks]
        with peers.reading(sum(file.data_bytes for file in files)):
            return verify_files(found.path, files, settings.threads)

    return peers.pool(share)


def _tell(damaged: dict[Path, list[Problem]]) -> None:
    for path, problems in damaged.items():
        text = f"the checkpoint {path} is damaged and passed over: {problems[0]}"
        warnings.warn(text, stacklevel=4)  # points at whoever called `Checkpoints.load`


def _absent(folder: Path, step: int | None, found: tuple[Found, ...]) -> Problem:
    if step is None or not found:
        return Problem(str(folder), "there is no checkpoint", "save one first")
    steps = ", ".join(str(step) for step in sorted({one.step for one in found}))
    return Problem(str(folder), f"there is no checkpoint of step {step}", f"use one of {steps}")
