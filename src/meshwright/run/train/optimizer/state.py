"""The state kept beside each parameter: a master, moments, scales of 8-bit moments."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from meshwright.run.kernels.optimizer_tensors import Moment, OptimizerTensors, new_moment
from meshwright.run.kernels.places import Places
from meshwright.run.kernels.stochastic_rounding import tensor_key
from meshwright.run.train.optimizer.groups import Treatment
from meshwright.run.train.optimizer.precision import StateFormats

MOMENT_NAMES = ("first", "second")


class ParameterState(NamedTuple):
    """A parameter with all that is kept for it."""

    name: str
    parameter: torch.nn.Parameter
    treatment: Treatment
    master: torch.Tensor | None
    moments: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...]
    """One for each 8-bit moment."""

    @classmethod
    def new(
        cls,
        name: str,
        parameter: torch.nn.Parameter,
        treatment: Treatment,
        formats: StateFormats,
        moments: int,
    ) -> "ParameterState":
        """Return the state before the first step."""
        weight = parameter.detach()
        wants_master = formats.master and weight.dtype != torch.float32
        made = [new_moment((weight,), formats.moments, index) for index in range(moments)]
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
        return self.parameter.detach() if self.master is None else self.master

    @property
    def places(self) -> Places:
        """Where its elements stand in the whole parameter, of which it may be a part."""
        found: Places = getattr(self.parameter, "places", Places())
        return found

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what has to be saved, under names that begin with its kind."""
        if self.master is not None:
            yield f"master.{self.name}", self.master
        for kind, value in zip(MOMENT_NAMES, self.moments, strict=False):
            yield f"{kind}.{self.name}", value
        for kind, value in zip(MOMENT_NAMES, self.scales, strict=False):
            yield f"{kind}_scale.{self.name}", value


def listed(states: Sequence[ParameterState], moments: int, seed: int) -> OptimizerTensors:
    """Put parameters of one type together for an update that uses so many of their moments."""
    return OptimizerTensors(
        params=tuple(each.parameter for each in states),
        masters=tuple(each.master for each in states if each.master is not None),
        moments=tuple(
            Moment(
                tuple(each.moments[index] for each in states),
                tuple(each.scales[index] for each in states if each.scales),
            )
            for index in range(moments)
        ),
        keys=tuple(tensor_key(each.name, seed) for each in states),
        shares=tuple(each.treatment.lr_share for each in states),
        decays=tuple(each.treatment.decay for each in states),
        places=tuple(each.places for each in states),
    )
