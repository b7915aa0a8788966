"""`Optimizer`: updates the parameters of a model in place, without ever waiting for the device.

A step measures the gradients, clips them, leaves everything as it is where one of them is not
finite, and otherwise updates all parameters of a kind in one launch. State is plain tensors under
the names of their parameters; saving and loading them is all that a resume needs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.optimizer.fused_update import FusedOptimizerUpdate
from meshwright.run.kernels.optimizer.grad_norm import GradNorm, compute_grad_norm
from meshwright.run.kernels.optimizer.multi_tensor import TensorList
from meshwright.run.kernels.optimizer.update_inputs import (
    StepScalars,
    UpdateRule,
    make_step_scalars,
)
from meshwright.run.kernels.triton_compat import KernelBackend
from meshwright.run.train.optimizer.ema import WeightEMA
from meshwright.run.train.optimizer.grad_scaler import DynamicGradScaler, compute_clip_scale
from meshwright.run.train.optimizer.lr_schedule import compute_learning_rate
from meshwright.run.train.optimizer.muon import MatrixGather, orthogonalize_
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.run.train.optimizer.param_groups import get_param_options
from meshwright.run.train.optimizer.param_state import ParameterState, make_optimizer_tensors
from meshwright.run.train.optimizer.state_dtypes import get_state_dtypes
from meshwright.spec.layout import Layout


class OptimizerStepReport(NamedTuple):
    """What a step found; reading it waits for the device."""

    grad_norm: torch.Tensor
    """float32 scalar: length of the gradients before clipping."""
    nonfinite_count: torch.Tensor
    """int64 scalar: how many of their elements are infinite or NaN."""
    is_skipped: torch.Tensor
    """bool scalar: whether nothing was updated, as a gradient was not finite."""


def make_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    layout: Layout,
    settings: OptimizerConfig,
    *,
    total_steps: int,
    seed: int = 0,
    parts: Mapping[str, tuple[int, ...]] | None = None,
    matrices: MatrixGather | None = None,
    backend: KernelBackend = "auto",
) -> "Optimizer":
    """Return the optimizer a layout names for all parameters that want gradients.

    Autograd is told to accumulate gradients in the layout's format. `parts` has the rows of each
    matrix in parameters that stack several, for Muon (`list_stacked_matrix_rows` knows them of a
    decoder); `matrices` makes whole what it works on, where ranks hold parts.
    """
    formats = get_state_dtypes(layout)
    rules = _rules(layout, settings)
    states = []
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        parameter.grad_dtype = formats.gradients
        treated = get_param_options(name, parameter, settings, muon=layout.optimizer == "muon")
        rule = rules.direction if treated.use_muon else rules.elementwise
        states.append(ParameterState.create(name, parameter, treated, formats, rule.num_moments))
    if not states:
        fix = "set requires_grad on some of them"
        raise InputError([Problem("parameters", "no trainable parameters", fix)])
    return Optimizer(
        states,
        rules,
        settings,
        total_steps=total_steps,
        seed=seed,
        loss_scaled=layout.precision == "fp16",
        parts=parts or {},
        matrices=matrices,
        backend=backend,
    )


class Optimizer:
    """The optimizer of one run; `make_optimizer` builds it."""

    def __init__(
        self,
        states: Sequence[ParameterState],
        update_rules: "UpdateRules",
        config: OptimizerConfig,
        *,
        total_steps: int,
        seed: int,
        loss_scaled: bool,
        parts: Mapping[str, tuple[int, ...]],
        matrices: MatrixGather | None,
        backend: KernelBackend,
    ) -> None:
        device = states[0].parameter.device
        self.config, self.update_rules, self.total_steps, self.seed = (
            config,
            update_rules,
            total_steps,
            seed,
        )
        self.states = {each.name: each for each in states}
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self.grad_scaler = (
            DynamicGradScaler.create(config.grad_scaler, device) if loss_scaled else None
        )
        self.ema = None
        if config.ema_decay is not None:
            self.ema = WeightEMA(
                states, config.ema_decay, config.ema_dtype, seed=seed, backend=backend
            )
        self._parts, self._matrices, self._backend = parts, matrices, backend
        self._bound: _Bound | None = None

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return compute_learning_rate(step, self.total_steps, self.config)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Return the gradients that backward left at the parameters."""
        found = ((name, state.parameter.grad) for name, state in self.states.items())
        return {name: grad for name, grad in found if grad is not None}

    def zero_grad(self) -> None:
        """Drop all gradients, after a step."""
        for state in self.states.values():
            state.parameter.grad = None

    @torch.no_grad()
    def step(
        self,
        lr: float,
        *,
        grad_scale: torch.Tensor | None = None,
        norm: GradNorm | None = None,
        gradients: Mapping[str, torch.Tensor] | None = None,
    ) -> OptimizerStepReport:
        """Update every parameter that has a gradient; those without one stay.

        `grad_scale` turns gradients into those of the loss, such as 1 / tokens; loss scaling is
        undone beside it. `norm` is what was measured before that, where it is known already (over
        several devices). `gradients` replace those at the parameters. With Muon, gradients
        hold its steps afterwards.
        """
        gradients = self.gradients() if gradients is None else gradients
        bound = self._bind(gradients)
        if norm is None:
            norm = compute_grad_norm(bound.all_gradients, backend=self._backend)
        if self.grad_scaler is not None:
            unscale = 1 / self.grad_scaler.scale
            grad_scale = unscale if grad_scale is None else grad_scale * unscale
        ready = compute_clip_scale(norm.norm, grad_scale, self.config.clip_grad)
        self.steps.add_(ready.is_finite)
        if self.grad_scaler is not None:
            self.grad_scaler.update_(ready.is_finite)

        now = make_step_scalars(
            self.steps,
            lr,
            self.update_rules.elementwise,
            grad_scale=ready.grad_scale,
            apply_update=ready.is_finite,
        )
        self._find_directions(bound.buckets, gradients, now)
        for bucket in bound.buckets:
            self._update(bucket, [gradients[name] for name in bucket.names], now)
        if self.ema is not None:
            self.ema.update_(now)
        # Gradients are the parameters': their memory is free for forward once those drop them.
        self._bound = bound._replace(all_gradients=bound.all_gradients.release())
        return OptimizerStepReport(ready.grad_norm, norm.nonfinite_count, ~ready.is_finite)

    def iter_state_tensors(self) -> Iterator[torch.Tensor]:
        """Yield all that is kept for parameters, and grows with them: masters, moments, averages.

        Who moves these calls `release_tensors` before.
        """
        for each in self.states.values():
            yield from (value for _, value in each.named_tensors())
        if self.ema is not None:
            yield from self.ema.ema_tensors.values()

    def release_tensors(self) -> None:
        """Hold no address of any tensor until the next step, which looks them up anew."""
        self._bound = None
        if self.ema is not None:
            self.ema.release_tensors()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return everything that has to be saved: the tensors themselves, not copies."""
        state = {"steps": self.steps}
        for each in self.states.values():
            state.update(each.named_tensors())
        if self.grad_scaler is not None:
            state["loss_scale"] = self.grad_scaler.scale
            state["loss_scale_sound_steps"] = self.grad_scaler.good_steps
        if self.ema is not None:
            state |= {f"average.{name}": value for name, value in self.ema.ema_tensors.items()}
        return state

    @torch.no_grad()
    def load_state_dict(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Take over saved state; every tensor has to be there, in the same format and shape."""
        own = self.state_dict()
        problems = [
            Problem(name, "is not in the saved state", _OTHER) for name in own.keys() - saved
        ]
        problems += [
            Problem(name, "is not kept by this run", _OTHER) for name in saved.keys() - own
        ]
        for name in own.keys() & saved:
            mine, other = own[name], saved[name]
            if (mine.dtype, mine.shape) != (other.dtype, other.shape):
                what = f"saved as {other.dtype} {tuple(other.shape)}, kept as {mine.dtype} "
                problems.append(Problem(name, what + str(tuple(mine.shape)), _OTHER))
        if problems:
            raise InputError(sorted(problems))
        for name, tensor in own.items():
            tensor.copy_(saved[name])

    def _find_directions(
        self, buckets: Sequence["_Bucket"], gradients: Mapping[str, torch.Tensor], now: StepScalars
    ) -> None:
        """Turn the gradients of matrices into Muon's steps, where it updates any."""
        mine: dict[str, torch.Tensor] = {}
        for bucket in buckets:
            if bucket.direction is not None:
                some = {name: gradients[name] for name in bucket.names}
                bucket.direction(list(some.values()), now)
                mine |= some
        if self._matrices is not None:  # also where other ranks alone have matrices
            self._matrices(mine, lambda name, whole: self._orthogonalise({name: whole}))
        elif mine:
            self._orthogonalise(mine)

    def _orthogonalise(self, directions: Mapping[str, torch.Tensor]) -> None:
        orthogonalize_(
            list(directions.values()),
            [self._parts.get(name, ()) for name in directions],
            scale=self.config.muon_scale,
            steps=self.config.muon_ns_steps,
        )

    def _update(self, bucket: "_Bucket", gradients: list[torch.Tensor], now: StepScalars) -> None:
        if bucket.direction is not None:
            # What gradients were multiplied by went into the momentum, and so did clipping.
            plain = torch.ones_like(now.scalars)
            plain[0], plain[2] = now.scalars[0], now.scalars[2]
            now = StepScalars(now.step, plain)
        bucket.update(gradients, now)

    def _bind(self, gradients: Mapping[str, torch.Tensor]) -> "_Bound":
        """Sort the parameters that have gradients into launches; the same ones as last, mostly."""
        named = tuple((name, gradients[name].dtype) for name in self.states if name in gradients)
        if self._bound is None or self._bound.named != named:
            self._bound = self._sorted(named, gradients)
        held = [gradients[name] for name, _ in named]
        renewed = self._bound.all_gradients.repoint(held)
        self._bound = self._bound._replace(all_gradients=renewed)
        return self._bound

    def _sorted(
        self,
        named: tuple[tuple[str, torch.dtype], ...],
        gradients: Mapping[str, torch.Tensor],
    ) -> "_Bound":
        if not named:
            raise InputError([Problem("gradients", "no parameter has one", "run backward first")])
        alike: dict[tuple[object, ...], list[ParameterState]] = {}
        for name, kind in named:
            state = self.states[name]
            # Parts with gaps go by themselves: looking up where their elements stand takes longer.
            key = (
                state.param_options.use_muon,
                state.parameter.dtype,
                kind,
                state.global_index_map.is_contiguous,
            )
            alike.setdefault(key, []).append(state)
        buckets = tuple(
            _bucket(states, self.update_rules, self.seed, self._backend)
            for states in alike.values()
        )
        return _Bound(
            named, buckets, TensorList.from_tensors([gradients[name] for name, _ in named])
        )


_OTHER = "resume with the optimizer, layout precisions and model of the saved run"


class UpdateRules(NamedTuple):
    """The rules of an optimizer."""

    elementwise: UpdateRule
    direction: UpdateRule
    """Muon's momentum; matrices under Muon follow it instead."""


def _rules(layout: Layout, settings: OptimizerConfig) -> UpdateRules:
    direction = UpdateRule("direction", beta1=settings.momentum, nesterov=settings.nesterov)
    match layout.optimizer:
        case "adamw" | "muon":
            betas = settings.betas or (0.9, 0.95)
            return UpdateRules(UpdateRule("adamw", *betas, settings.eps), direction)
        case "lion":
            return UpdateRules(UpdateRule("lion", *(settings.betas or (0.9, 0.99))), direction)
        case "sgd":
            rule = UpdateRule("sgd", beta1=settings.momentum, nesterov=settings.nesterov)
            return UpdateRules(rule, direction)


class _Bucket(NamedTuple):
    """Parameters that one launch updates."""

    names: tuple[str, ...]
    update: FusedOptimizerUpdate
    direction: FusedOptimizerUpdate | None
    """What comes before it under Muon."""


class _Bound(NamedTuple):
    """The launches for a set of gradients."""

    named: tuple[tuple[str, torch.dtype], ...]
    buckets: tuple[_Bucket, ...]
    all_gradients: TensorList


def _bucket(
    states: Sequence[ParameterState], rules: UpdateRules, seed: int, backend: KernelBackend
) -> _Bucket:
    names = tuple(each.name for each in states)
    if not states[0].param_options.use_muon:
        tensors = make_optimizer_tensors(states, rules.elementwise.num_moments, seed)
        return _Bucket(
            names, FusedOptimizerUpdate(tensors, rules.elementwise, backend=backend), None
        )
    apply = FusedOptimizerUpdate(
        make_optimizer_tensors(states, 0, seed), UpdateRule("apply"), backend=backend
    )
    momentum = FusedOptimizerUpdate(
        make_optimizer_tensors(states, 1, seed), rules.direction, backend=backend
    )
    return _Bucket(names, apply, momentum)
