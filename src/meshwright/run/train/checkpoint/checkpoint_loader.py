"""`select_checkpoint` and `load_tensors`: the newest checkpoint that is whole, read into tensors.

A load happens in this order, each part on all ranks before the next: find one that is whole,
compare its names, shapes and types with what is asked for, read. Until then nothing is changed.
"""

import warnings
from pathlib import Path
from typing import Any, Literal, NamedTuple

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.run.train.checkpoint.checkpoint_config import CheckpointConfig
from meshwright.run.train.checkpoint.checkpoint_folder import (
    CheckpointFolder,
    SavedCheckpoint,
    read_metadata,
)
from meshwright.run.train.checkpoint.checksums import verify_files
from meshwright.run.train.checkpoint.load_plan import find_load_plan_problems, plan_reads
from meshwright.run.train.checkpoint.metadata import decode_extra
from meshwright.run.train.checkpoint.rank_coordinator import RankCoordinator
from meshwright.run.train.checkpoint.read_items import read_items
from meshwright.run.train.checkpoint.requantization import plan_requantization, requantize
from meshwright.run.train.checkpoint.savable_tensors import (
    SavableTensors,
    convert_to_sharded_tensors,
)

UnrequestedPolicy = Literal["error", "ignore"]
"""What to do with saved tensors that no rank asks for."""


class LoadResult(NamedTuple):
    """What a load brought back beside the tensors."""

    step: int
    extra: dict[str, Any]
    checkpoint: SavedCheckpoint


def select_checkpoint(
    folder: CheckpointFolder, step: int | None, peers: RankCoordinator, settings: CheckpointConfig
) -> SavedCheckpoint:
    """Find the newest save, or the newest of a step, that is whole; all ranks get the same."""
    present = peers.all_reduce(lambda: None, lambda _: folder.list_saved())
    wanted = [one for one in reversed(present) if step is None or one.step == step]
    if not wanted:
        raise InputError([_absent(folder.path, step, present)])
    damaged: dict[Path, list[Problem]] = {}
    for found in wanted:
        problems = _damage(found, peers, settings)
        if not problems:
            if peers.is_coordinator:
                _tell(damaged)
            return found
        damaged[found.path] = problems
        if step is not None or settings.on_damaged == "error":
            break
    raise DamagedFile(problem for problems in damaged.values() for problem in problems)


def load_tensors(
    found: SavedCheckpoint,
    into: SavableTensors,
    leftover: UnrequestedPolicy,
    peers: RankCoordinator,
    settings: CheckpointConfig,
) -> LoadResult:
    """Read a checkpoint into tensors that fit it; anything else is refused before it starts."""
    record = read_metadata(found.path)
    placed = convert_to_sharded_tensors(into)
    anew = plan_requantization(record, found.path, into, placed)
    for each in anew:
        del placed[each.name]
    problems = find_load_plan_problems(record, placed, anew, leftover == "error", peers)
    if problems:
        raise InputError(problems)
    with peers.expect_read_delay(sum(each.tensor.nbytes for each in placed.values())):
        read_items(found.path, list(plan_reads(record, placed)), settings.threads)
        for each in anew:
            requantize(record, found.path, each, settings.threads)
    return LoadResult(record.step, decode_extra(record), found)


def _damage(
    found: SavedCheckpoint, peers: RankCoordinator, settings: CheckpointConfig
) -> list[Problem]:
    """Say what is wrong with a checkpoint; each rank reads its share of the files."""

    def share() -> list[Problem]:
        try:
            record = read_metadata(found.path)
        except DamagedFile as error:
            return list(error.problems)
        if settings.verify == "sizes":
            return []
        files = record.files[peers.rank :: peers.ranks]
        with peers.expect_read_delay(sum(file.data_bytes for file in files)):
            return verify_files(found.path, files, settings.threads)

    return peers.all_gather(share)


def _tell(damaged: dict[Path, list[Problem]]) -> None:
    for path, problems in damaged.items():
        text = f"the checkpoint {path} is damaged and passed over: {problems[0]}"
        warnings.warn(text, stacklevel=4)  # points at whoever called `CheckpointManager.load`


def _absent(folder: Path, step: int | None, found: tuple[SavedCheckpoint, ...]) -> Problem:
    if step is None or not found:
        return Problem(str(folder), "there is no checkpoint", "save one first")
    steps = ", ".join(str(step) for step in sorted({one.step for one in found}))
    return Problem(str(folder), f"there is no checkpoint of step {step}", f"use one of {steps}")
