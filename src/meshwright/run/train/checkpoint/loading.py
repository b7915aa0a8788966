"""`choose` and `load_into`: the newest checkpoint that is whole, read into tensors.

A load happens in this order, each part on all ranks before the next: find one that is whole,
compare its names, shapes and types with what is asked for, read. Until then nothing is changed.
"""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.run.train.checkpoint.folder import Folder, Found, read_record
from meshwright.run.train.checkpoint.image import TORCH_DTYPES
from meshwright.run.train.checkpoint.peers import Peers
from meshwright.run.train.checkpoint.reader import CheckpointReader
from meshwright.run.train.checkpoint.record import Record, decode_extra
from meshwright.run.train.checkpoint.settings import CheckpointSettings
from meshwright.run.train.checkpoint.verify import verify_files

Leftover = Literal["refuse", "leave"]
"""What to do with saved tensors that nobody asks for."""


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
    into: Mapping[str, torch.Tensor],
    leftover: Leftover,
    peers: Peers,
    settings: CheckpointSettings,
) -> Loaded:
    """Read a checkpoint into tensors that fit it; anything else is refused before it starts."""
    record = read_record(found.path)
    problems = peers.pool(lambda: _misfits(record, into, leftover))
    if problems:
        raise InputError(problems)
    reader = CheckpointReader(found.path, record, threads=settings.threads)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = reader.read_metadata()
    planner.set_up_planner(dict(into), metadata, peers.first)
    reader.set_up_storage_reader(metadata, peers.first)
    reader.read_data(planner.create_local_plan(), planner)
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
        return verify_files(found.path, record.files[peers.rank :: peers.ranks], settings.threads)

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


def _misfits(record: Record, into: Mapping[str, torch.Tensor], leftover: Leftover) -> list[Problem]:
    """Say which tensors cannot be loaded as they are."""
    problems = []
    for name, tensor in into.items():
        saved = record.tensors.get(name)
        if saved is None:
            problems.append(Problem(name, "the checkpoint has no such tensor", "leave it out"))
            continue
        if tensor.is_meta:
            problems.append(Problem(name, "it is on `meta` and holds no data", "materialise it"))
        if saved.shape != tuple(tensor.shape):
            what = f"it was saved as {list(saved.shape)} and is {list(tensor.shape)} here"
            problems.append(Problem(name, what, "load into the model that was saved"))
        if TORCH_DTYPES[saved.dtype] != tensor.dtype:
            what = f"it was saved as {TORCH_DTYPES[saved.dtype]} and is {tensor.dtype} here"
            problems.append(Problem(name, what, "load into its own type and convert it then"))
    if leftover == "refuse":
        problems += [
            Problem(name, "it was saved, and nothing asks for it", 'use leftover="leave"')
            for name in record.tensors
            if name not in into
        ]
    return problems
