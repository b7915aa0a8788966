"""The state kept beside each parameter: a master, moments, scales of 8-bit moments."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from meshwright.run.kernels.optimizer.global_index import GlobalIndexMap
from meshwright.run.kernels.optimizer.stochastic_rounding import make_tensor_key
from meshwright.run.kernels.optimizer.update_inputs import (
    OptimizerMoment,
    OptimizerTensors,
    allocate_moment,
)
from meshwright.run.train.optimizer.param_groups import ParamOptions
from meshwright.run.train.optimizer.state_dtypes import StateDtypes

MOMENT_NAMES = ("first", "second")


class ParameterState(NamedTuple):
    """A parameter with all that is kept for it."""

    name: str
    parameter: torch.nn.Parameter
    param_options: ParamOptions
    master_weight: torch.Tensor | None
    moments: tuple[torch.Tensor, ...]
    moment_scales: tuple[torch.Tensor, ...]
    """One for each 8-bit moment."""

    @classmethod
    def create(
        cls,
        name: str,
        parameter: torch.nn.Parameter,
        treatment: ParamOptions,
        formats: StateDtypes,
        moments: int,
    ) -> "ParameterState":
        """Return the state before the first step."""
        weight = parameter.detach()
        wants_master = formats.has_master_weights and weight.dtype != torch.float32
        made = [allocate_moment((weight,), formats.moment_dtype, index) for index in range(moments)]
        return cls(
            name,
            parameter,
            treatment,
            weight.float() if wants_master else None,
            tuple(moment.values[0] for moment in made),
            tuple(moment.scales[0] for moment in made if moment.scales),
        )

    @property
    def weight(self) -> torch.Tensor:
        """The most exact copy of the weight."""
        return self.parameter.detach() if self.master_weight is None else self.master_weight

    @property
    def global_index_map(self) -> GlobalIndexMap:
        """Where its elements stand in the whole parameter, of which it may be a part."""
        found: GlobalIndexMap = getattr(self.parameter, "global_index_map", GlobalIndexMap())
        return found

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what has to be saved, under names that begin with its kind."""
        if self.master_weight is not None:
            yield f"master.{self.name}", self.master_weight
        for kind, value in zip(MOMENT_NAMES, self.moments, strict=False):
            yield f"{kind}.{self.name}", value
        for kind, value in zip(MOMENT_NAMES, self.moment_scales, strict=False):
            yield f"{kind}_scale.{self.name}", value


def make_optimizer_tensors(
    states: Sequence[ParameterState], moments: int, seed: int
) -> OptimizerTensors:
    """Put parameters of one type together for an update that uses so many of their moments."""
    return OptimizerTensors(
        params=tuple(each.parameter for each in states),
        masters=tuple(each.master_weight for each in states if each.master_weight is not None),
        moments=tuple(
            OptimizerMoment(
                tuple(each.moments[index] for each in states),
                tuple(each.moment_scales[index] for each in states if each.moment_scales),
            )
            for index in range(moments)
        ),
        rounding_keys=tuple(make_tensor_key(each.name, seed) for each in states),
        lr_multipliers=tuple(each.param_options.lr_mult for each in states),
        weight_decays=tuple(each.param_options.weight_decay for each in states),
        global_index_maps=tuple(each.global_index_map for each in states),
    )
