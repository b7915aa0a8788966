"""`Optimizer`: updates the parameters of a model in place, without ever waiting for the device.

A step measures the gradients, clips them, leaves everything as it is where one of them is not
finite, and otherwise updates all parameters of a kind in one launch. State is plain tensors under
the names of their parameters; saving and loading them is all that a resume needs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.adamw import FusedUpdate
from meshwright.run.kernels.gradient_norm import GradientNorm, gradient_norm
from meshwright.run.kernels.language import Backend
from meshwright.run.kernels.optimizer_tensors import Pace, Rule, pace
from meshwright.run.kernels.tensor_list import TensorList
from meshwright.run.train.optimizer.average import WeightAverage
from meshwright.run.train.optimizer.clipping import readiness
from meshwright.run.train.optimizer.groups import treatment
from meshwright.run.train.optimizer.loss_scale import LossScale
from meshwright.run.train.optimizer.muon import Matrices, orthogonalise_
from meshwright.run.train.optimizer.precision import state_formats
from meshwright.run.train.optimizer.schedule import learning_rate
from meshwright.run.train.optimizer.settings import OptimizerSettings
from meshwright.run.train.optimizer.state import ParameterState, listed
from meshwright.spec.layout import Layout


class StepReport(NamedTuple):
    """What a step found; reading it waits for the device."""

    norm: torch.Tensor
    """float32 scalar: length of the gradients before clipping."""
    nonfinite: torch.Tensor
    """int64 scalar: how many of their elements are infinite or NaN."""
    skipped: torch.Tensor
    """bool scalar: whether nothing was updated, as a gradient was not finite."""


def make_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    layout: Layout,
    settings: OptimizerSettings,
    *,
    total_steps: int,
    seed: int = 0,
    parts: Mapping[str, tuple[int, ...]] | None = None,
    matrices: Matrices | None = None,
    backend: Backend = "auto",
) -> "Optimizer":
    """Return the optimizer a layout names for all parameters that want gradients.

    Autograd is told to accumulate gradients in the layout's format. `parts` has the rows of each
    matrix in parameters that stack several, for Muon (`matrix_parts` knows them of a decoder);
    `matrices` makes whole what it works on, where ranks hold parts.
    """
    formats = state_formats(layout)
    rules = _rules(layout, settings)
    states = []
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        parameter.grad_dtype = formats.gradients
        treated = treatment(name, parameter, settings, muon=layout.optimizer == "muon")
        rule = rules.direction if treated.by_muon else rules.elementwise
        states.append(ParameterState.new(name, parameter, treated, formats, rule.moments))
    if not states:
        raise InputError([Problem("parameters", "none of them wants a gradient", "train some")])
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
        rules: "Rules",
        settings: OptimizerSettings,
        *,
        total_steps: int,
        seed: int,
        loss_scaled: bool,
        parts: Mapping[str, tuple[int, ...]],
        matrices: Matrices | None,
        backend: Backend,
    ) -> None:
        device = states[0].parameter.device
        self.settings, self.rules, self.total_steps, self.seed = settings, rules, total_steps, seed
        self.states = {each.name: each for each in states}
        self.steps = torch.zeros((), dtype=torch.int64, device=device)
        self.loss_scale = LossScale.start(settings.loss_scale, device) if loss_scaled else None
        self.average = None
        if settings.average is not None:
            self.average = WeightAverage(
                states, settings.average, settings.average_precision, seed=seed, backend=backend
            )
        self._parts, self._matrices, self._backend = parts, matrices, backend
        self._bound: _Bound | None = None

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return learning_rate(step, self.total_steps, self.settings)

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
        norm: GradientNorm | None = None,
        gradients: Mapping[str, torch.Tensor] | None = None,
    ) -> StepReport:
        """Update every parameter that has a gradient; those without one stay.

        `grad_scale` turns gradients into those of the loss, such as 1 / tokens; loss scaling is
        undone beside it. `norm` is what was measured before that, where it is known already (over
        several devices). `gradients` replace those at the parameters. With Muon, gradients
        hold its steps afterwards.
        """
        gradients = self.gradients() if gradients is None else gradients
        bound = self._bind(gradients)
        if norm is None:
            norm = gradient_norm(bound.all_gradients, backend=self._backend)
        if self.loss_scale is not None:
            unscale = 1 / self.loss_scale.scale
            grad_scale = unscale if grad_scale is None else grad_scale * unscale
        ready = readiness(norm.norm, grad_scale, self.settings.clip)
        self.steps.add_(ready.go)
        if self.loss_scale is not None:
            self.loss_scale.update_(ready.go)

        now = pace(self.steps, lr, self.rules.elementwise, grad_scale=ready.grad_scale, go=ready.go)
        self._find_directions(bound.buckets, gradients, now)
        for bucket in bound.buckets:
            self._update(bucket, [gradients[name] for name in bucket.names], now)
        if self.average is not None:
            self.average.update_(now)
        # Gradients are the parameters': their memory is free for forward once those drop them.
        self._bound = bound._replace(all_gradients=bound.all_gradients.letting_go())
        return StepReport(ready.norm, norm.nonfinite, ~ready.go)

    def kept(self) -> Iterator[torch.Tensor]:
        """Yield all that is kept for parameters, and grows with them: masters, moments, averages.

        Who moves these calls `let_go` before.
        """
        for each in self.states.values():
            yield from (value for _, value in each.tensors())
        if self.average is not None:
            yield from self.average.averages.values()

    def let_go(self) -> None:
        """Hold no address of any tensor until the next step, which looks them up anew."""
        self._bound = None
        if self.average is not None:
            self.average.let_go()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return everything that has to be saved: the tensors themselves, not copies."""
        state = {"steps": self.steps}
        for each in self.states.values():
            state.update(each.tensors())
        if self.loss_scale is not None:
            state["loss_scale"] = self.loss_scale.scale
            state["loss_scale_sound_steps"] = self.loss_scale.sound_steps
        if self.average is not None:
            state |= {f"average.{name}": value for name, value in self.average.averages.items()}
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
        self, buckets: Sequence["_Bucket"], gradients: Mapping[str, torch.Tensor], now: Pace
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
        orthogonalise_(
            list(directions.values()),
            [self._parts.get(name, ()) for name in directions],
            scale=self.settings.muon_scale,
            steps=self.settings.muon_steps,
        )

    def _update(self, bucket: "_Bucket", gradients: list[torch.Tensor], now: Pace) -> None:
        if bucket.direction is not None:
            # What gradients were multiplied by went into the momentum, and so did clipping.
            plain = torch.ones_like(now.numbers)
            plain[0], plain[2] = now.numbers[0], now.numbers[2]
            now = Pace(now.step, plain)
        bucket.update(gradients, now)

    def _bind(self, gradients: Mapping[str, torch.Tensor]) -> "_Bound":
        """Sort the parameters that have gradients into launches; the same ones as last, mostly."""
        named = tuple((name, gradients[name].dtype) for name in self.states if name in gradients)
        if self._bound is None or self._bound.named != named:
            self._bound = self._sorted(named, gradients)
        held = [gradients[name] for name, _ in named]
        renewed = self._bound.all_gradients.pointing_at(held)
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
            key = (state.treatment.by_muon, state.parameter.dtype, kind, state.places.is_run)
            alike.setdefault(key, []).append(state)
        buckets = tuple(
            _bucket(states, self.rules, self.seed, self._backend) for states in alike.values()
        )
        return _Bound(named, buckets, TensorList.of([gradients[name] for name, _ in named]))


_OTHER = "resume with the optimizer, layout precisions and model of the saved run"


class Rules(NamedTuple):
    """The rules of an optimizer."""

    elementwise: Rule
    direction: Rule
    """Muon's momentum; matrices under Muon follow it instead."""


def _rules(layout: Layout, settings: OptimizerSettings) -> Rules:
    direction = Rule("direction", beta1=settings.momentum, nesterov=settings.nesterov)
    match layout.optimizer:
        case "adamw" | "muon":
            betas = settings.betas or (0.9, 0.95)
            return Rules(Rule("adamw", *betas, settings.eps), direction)
        case "lion":
            return Rules(Rule("lion", *(settings.betas or (0.9, 0.99))), direction)
        case "sgd":
            rule = Rule("sgd", beta1=settings.momentum, nesterov=settings.nesterov)
            return Rules(rule, direction)


class _Bucket(NamedTuple):
    """Parameters that one launch updates."""

    names: tuple[str, ...]
    update: FusedUpdate
    direction: FusedUpdate | None
    """What comes before it under Muon."""


class _Bound(NamedTuple):
    """The launches for a set of gradients."""

    named: tuple[tuple[str, torch.dtype], ...]
    buckets: tuple[_Bucket, ...]
    all_gradients: TensorList


def _bucket(states: Sequence[ParameterState], rules: Rules, seed: int, backend: Backend) -> _Bucket:
    names = tuple(each.name for each in states)
    if not states[0].treatment.by_muon:
        tensors = listed(states, rules.elementwise.moments, seed)
        return _Bucket(names, FusedUpdate(tensors, rules.elementwise, backend=backend), None)
    apply = FusedUpdate(listed(states, 0, seed), Rule("apply"), backend=backend)
    momentum = FusedUpdate(listed(states, 1, seed), rules.direction, backend=backend)
    return _Bucket(names, apply, momentum)
