"""Runs of a loop over ranks of this machine, each a process that is forked."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.run.parallel.launch.rank_spawner import RankResult, spawn_ranks_with_results
from meshwright.run.posttrain.rl import RLConfig, run_rl
from meshwright.run.train.checkpoint.checkpoint_folder import read_metadata
from meshwright.run.train.checkpoint.manager import CheckpointManager
from tests.run.parallel.meeting_place import leave_to_meet_again


class Ran(NamedTuple):
    """What a rank's run came to."""

    rows: tuple[dict[str, float], ...]
    notes: tuple[str, ...]
    held_out: dict[int, dict[str, float]]


def on_ranks(
    ranks: int,
    settings: RLConfig,
    *,
    before: Callable[[int], object] | None = None,
    timeout_s: float = 600.0,
) -> list[RankResult]:
    """Run a loop on so many ranks; `before` is called on each, with its number."""
    return spawn_ranks_with_results(ranks, _one, settings, before, timeout_s=timeout_s)


def first_of(outcomes: list[RankResult]) -> Ran:
    """Return what the first rank tells; all have to have ended well."""
    for one in outcomes:
        if one.error is not None:
            raise one.error
        assert one.exit_code == 0, outcomes
    found: Ran = outcomes[0].value
    return found


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a run's last checkpoint, whole; those of a critic as well."""
    with CheckpointManager(folder / "checkpoints") as checkpoints:
        found = checkpoints.find_latest()
        assert found is not None
        named = read_metadata(found.path).tensors
        into = {
            name: torch.empty(each.shape, dtype=torch.float32)
            for name, each in named.items()
            if name.startswith(("model.", "critic.model."))
        }
        checkpoints.load(into, leftover="ignore")
    return into


def _one(settings: RLConfig, before: Callable[[int], object] | None) -> Ran:
    rank = dist.get_rank()
    os.environ |= leave_to_meet_again() | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
    if before is not None:
        before(rank)
    outcome = run_rl(settings)
    return Ran(outcome.step_metrics, outcome.notes, outcome.held_out_metrics)
