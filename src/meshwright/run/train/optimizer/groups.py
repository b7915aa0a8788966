"""Which parameter is updated how: by Muon or not, at which learning rate, with how much decay."""

from fnmatch import fnmatchcase
from typing import NamedTuple

import torch

from meshwright.run.train.optimizer.settings import OptimizerSettings

NOT_FOR_MUON = ("embedding.*", "*head.*", "positions.*", "*bias*", "*norm*", "*.conv.*")
"""Muon works on products inside blocks; tables and the head are AdamW's (arXiv 2502.16982)."""


class Treatment(NamedTuple):
    """How one parameter is updated."""

    by_muon: bool
    lr_share: float
    """What the learning rate of a step is multiplied by."""
    decay: float
    """What a step at learning rate 1 would take of the weight."""


def treatment(
    name: str, parameter: torch.Tensor, settings: OptimizerSettings, *, muon: bool
) -> Treatment:
    """Say how a parameter is updated in a run with or without Muon."""
    by_muon = muon and is_matrix(name, parameter)
    group = next((each for each in settings.groups if fnmatchcase(name, each.match)), None)
    decay = settings.decay if decays(name, parameter, settings) else 0.0
    share = 1.0
    if group is not None:
        decay = decay if group.decay is None else group.decay
        share = group.lr_share
    if by_muon and settings.muon_lr is not None:
        share *= settings.muon_lr / settings.lr
    return Treatment(by_muon, share, decay * share)


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Tell whether a parameter is one or more matrices that multiply activations in a block."""
    shape = whole_shape(parameter)
    if len(shape) < 2 or min(shape[-2:]) < 2:
        return False
    return not any(fnmatchcase(name, pattern) for pattern in NOT_FOR_MUON)


def decays(name: str, parameter: torch.Tensor, settings: OptimizerSettings) -> bool:
    """Tell whether a parameter decays by default: matrices do, unless their name is spared."""
    if len(whole_shape(parameter)) < 2:
        return False
    return not any(fnmatchcase(name, pattern) for pattern in settings.no_decay)


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape in the whole model; what has only a flat part of it was told (`shards`)."""
    found: tuple[int, ...] = getattr(parameter, "whole_shape", tuple(parameter.shape))
    return found
