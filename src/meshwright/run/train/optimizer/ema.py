"""`WeightEMA`: an exponential moving average of the weights, to evaluate or to keep."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from meshwright.run.kernels.optimizer.fused_update import FusedOptimizerUpdate
from meshwright.run.kernels.optimizer.stochastic_rounding import make_tensor_key
from meshwright.run.kernels.optimizer.update_inputs import (
    OptimizerMoment,
    OptimizerTensors,
    StepScalars,
    UpdateRule,
)
from meshwright.run.kernels.triton_compat import KernelBackend
from meshwright.run.train.optimizer.param_state import ParameterState


class WeightEMA:
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
        backend: KernelBackend = "auto",
    ) -> None:
        kind = torch.float32 if precision == "fp32" else torch.bfloat16
        self.ema_tensors = {
            each.name: each.weight.to(kind, copy=True, memory_format=torch.contiguous_format)
            for each in states
        }
        self._states, self._rule = states, UpdateRule("average", beta1=keep)
        self._seed, self._backend = seed, backend
        self._updates: list[tuple[FusedOptimizerUpdate, list[torch.Tensor]]] = []

    def update_(self, pace: StepScalars) -> None:
        """Move towards the weights, unless the step did not happen."""
        unscaled = pace.scalars.clone()
        unscaled[1] = 1.0
        if not self._updates:
            self._updates = [self._update(weights) for weights in _by_type(self._states)]
        for update, weights in self._updates:
            update(weights, StepScalars(pace.step, unscaled))

    def release_tensors(self) -> None:
        """Hold no view of any weight until the next update, which looks for them anew."""
        self._updates = []

    @contextmanager
    def swap_into(self, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Let parameters hold their averages for a while, such as for an evaluation."""
        with torch.no_grad():
            held = {name: parameters[name].detach().clone() for name in self.ema_tensors}
            try:
                for name, average in self.ema_tensors.items():
                    parameters[name].copy_(average)
                yield
            finally:
                for name, value in held.items():
                    parameters[name].copy_(value)

    def _update(
        self, weights: Sequence[ParameterState]
    ) -> tuple[FusedOptimizerUpdate, list[torch.Tensor]]:
        values = tuple(each.weight for each in weights)
        tensors = OptimizerTensors(
            params=values,
            masters=(),
            moments=(OptimizerMoment(tuple(self.ema_tensors[each.name] for each in weights)),),
            rounding_keys=tuple(
                make_tensor_key(f"average.{each.name}", self._seed) for each in weights
            ),
            lr_multipliers=(1.0,) * len(values),
            weight_decays=(0.0,) * len(values),
            global_index_maps=tuple(each.global_index_map for each in weights),
        )
        return FusedOptimizerUpdate(tensors, self._rule, backend=self._backend), list(values)


def _by_type(states: Sequence[ParameterState]) -> list[list[ParameterState]]:
    alike: dict[tuple[torch.dtype, bool], list[ParameterState]] = {}
    for each in states:
        alike.setdefault((each.weight.dtype, each.global_index_map.is_contiguous), []).append(each)
    return list(alike.values())
