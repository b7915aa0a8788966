"""`WeightAverage`: an exponential moving average of the weights, to evaluate or to keep."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from meshwright.run.kernels.adamw import FusedUpdate
from meshwright.run.kernels.language import Backend
from meshwright.run.kernels.optimizer_tensors import Moment, OptimizerTensors, Pace, Rule
from meshwright.run.kernels.stochastic_rounding import tensor_key
from meshwright.run.train.optimizer.state import ParameterState


class WeightAverage:
    """The average of each parameter, beginning with its first value.

    It follows masters where there are any. In bf16 it is rounded by chance: a step that keeps
    0.999 of it would otherwise never change it.
    """

    def __init__(
        self,
        states: Sequence[ParameterState],
        keep: float,
        precision: Literal["fp32", "bf16"],
        *,
        seed: int = 0,
        backend: Backend = "auto",
    ) -> None:
        kind = torch.float32 if precision == "fp32" else torch.bfloat16
        self.averages = {
            each.name: each.weight.to(kind, copy=True, memory_format=torch.contiguous_format)
            for each in states
        }
        self._states, self._rule = states, Rule("average", beta1=keep)
        self._seed, self._backend = seed, backend
        self._updates: list[tuple[FusedUpdate, list[torch.Tensor]]] = []

    def update_(self, pace: Pace) -> None:
        """Move towards the weights, unless the step did not happen."""
        unscaled = pace.numbers.clone()
        unscaled[1] = 1.0
        if not self._updates:
            self._updates = [self._update(weights) for weights in _by_type(self._states)]
        for update, weights in self._updates:
            update(weights, Pace(pace.step, unscaled))

    def let_go(self) -> None:
        """Hold no view of any weight until the next update, which looks for them anew."""
        self._updates = []

    @contextmanager
    def in_place_of(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Let parameters hold their averages for a while, such as for an evaluation."""
        with torch.no_grad():
            held = {name: parameters[name].detach().clone() for name in self.averages}
            try:
                for name, average in self.averages.items():
                    parameters[name].copy_(average)
                yield
            finally:
                for name, value in held.items():
                    parameters[name].copy_(value)

    def _update(self, weights: Sequence[ParameterState]) -> tuple[FusedUpdate, list[torch.Tensor]]:
        values = tuple(each.weight for each in weights)
        tensors = OptimizerTensors(
            params=values,
            masters=(),
            moments=(Moment(tuple(self.averages[each.name] for each in weights)),),
            keys=tuple(tensor_key(f"average.{each.name}", self._seed) for each in weights),
            shares=(1.0,) * len(values),
            decays=(0.0,) * len(values),
            places=tuple(each.places for each in weights),
        )
        return FusedUpdate(tensors, self._rule, backend=self._backend), list(values)


def _by_type(states: Sequence[ParameterState]) -> list[list[ParameterState]]:
    alike: dict[tuple[torch.dtype, bool], list[ParameterState]] = {}
    for each in states:
        alike.setdefault((each.weight.dtype, each.places.is_run), []).append(each)
    return list(alike.values())
