"""Which parameter is updated how: by Muon or not, at which learning rate, with how much decay."""

from fnmatch import fnmatchcase
from typing import NamedTuple

import torch

from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig

NON_MUON_PATTERNS = ("embedding.*", "*head.*", "positions.*", "*bias*", "*norm*", "*.conv.*")
"""Muon works on products inside blocks; tables and the head are AdamW's (arXiv 2502.16982)."""


class ParamOptions(NamedTuple):
    """How one parameter is updated."""

    use_muon: bool
    lr_mult: float
    """What the learning rate of a step is multiplied by."""
    weight_decay: float
    """What a step at learning rate 1 would take of the weight."""


def get_param_options(
    name: str, parameter: torch.Tensor, settings: OptimizerConfig, *, muon: bool
) -> ParamOptions:
    """Say how a parameter is updated in a run with or without Muon."""
    by_muon = muon and is_matrix(name, parameter)
    group = next((each for each in settings.groups if fnmatchcase(name, each.match)), None)
    decay = settings.weight_decay if should_decay(name, parameter, settings) else 0.0
    share = 1.0
    if group is not None:
        decay = decay if group.weight_decay is None else group.weight_decay
        share = group.lr_mult
    if by_muon and settings.muon_lr is not None:
        share *= settings.muon_lr / settings.lr
    return ParamOptions(by_muon, share, decay * share)


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Tell whether a parameter is one or more matrices that multiply activations in a block."""
    shape = get_global_shape(parameter)
    if len(shape) < 2 or min(shape[-2:]) < 2:
        return False
    return not any(fnmatchcase(name, pattern) for pattern in NON_MUON_PATTERNS)


def should_decay(name: str, parameter: torch.Tensor, settings: OptimizerConfig) -> bool:
    """Tell whether a parameter decays by default: matrices do, unless their name is spared."""
    if len(get_global_shape(parameter)) < 2:
        return False
    return not any(fnmatchcase(name, pattern) for pattern in settings.no_weight_decay)


def get_global_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape in the whole model; what has only a flat part of it was told (`shards`)."""
    found: tuple[int, ...] = getattr(parameter, "global_shape", tuple(parameter.shape))
    return found
