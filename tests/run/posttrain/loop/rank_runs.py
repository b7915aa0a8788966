"""Runs of a loop over ranks of this machine, each a process that is forked."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.run.parallel.collective.launch import Outcome, launch_all
from meshwright.run.posttrain.loop import LoopSettings, run
from meshwright.run.train.checkpoint.checkpoints import Checkpoints
from meshwright.run.train.checkpoint.folder import read_record
from tests.run.parallel.meeting_place import leave_to_meet_again


class Ran(NamedTuple):
    """What a rank's run came to."""

    rows: tuple[dict[str, float], ...]
    notes: tuple[str, ...]
    held_out: dict[int, dict[str, float]]


def on_ranks(
    ranks: int,
    settings: LoopSettings,
    *,
    before: Callable[[int], object] | None = None,
    timeout_s: float = 600.0,
) -> list[Outcome]:
    """Run a loop on so many ranks; `before` is called on each, with its number."""
    return launch_all(ranks, _one, settings, before, timeout_s=timeout_s)


def first_of(outcomes: list[Outcome]) -> Ran:
    """Return what the first rank tells; all have to have ended well."""
    for one in outcomes:
        if one.error is not None:
            raise one.error
        assert one.exit_code == 0, outcomes
    found: Ran = outcomes[0].value
    return found


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a run's last checkpoint, whole; those of a critic as well."""
    with Checkpoints(folder / "checkpoints") as checkpoints:
        found = checkpoints.latest()
        assert found is not None
        named = read_record(found.path).tensors
        into = {
            name: torch.empty(each.shape, dtype=torch.float32)
            for name, each in named.items()
            if name.startswith(("model.", "critic.model."))
        }
        checkpoints.load(into, leftover="leave")
    return into


def _one(settings: LoopSettings, before: Callable[[int], object] | None) -> Ran:
    rank = dist.get_rank()
    os.environ |= leave_to_meet_again() | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    if before is not None:
        before(rank)
    outcome = run(settings)
    return Ran(outcome.rows, outcome.notes, outcome.held_out)
