"""`OptimizerConfig`: how weights are updated. The layout names the optimizer and its formats."""

from typing import Literal, get_args

import msgspec

from meshwright.spec.field_checks import FieldChecker, check_number

ScheduleType = Literal["constant", "linear", "cosine", "wsd"]
DecayType = Literal["linear", "sqrt", "cosine"]
MuonScale = Literal["match-adamw", "spectral"]
EmaDtype = Literal["fp32", "bf16"]

MAX_DECAY = 0.999999
"""The largest share of a moment or average that a step may keep."""


class ParamGroupConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is different for the parameters of some names."""

    match: str
    """A pattern of names with * and ?, such as `embedding.*`; the first group to match counts."""
    lr_mult: float = 1.0
    """What the learning rate is multiplied by; decay, which it scales, follows."""
    weight_decay: float | None = None
    """Weight decay; None leaves what it would be without this group."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_empty(match=self.match)
        bounds.not_negative(lr_mult=self.lr_mult, weight_decay=self.weight_decay)
        bounds.raise_problems()


class GradScalerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How losses are scaled in fp16, whose gradients would vanish below 6e-8 (arXiv 1710.03740)."""

    init_scale: float = 65536.0
    """What the loss is multiplied by at the start."""
    growth_factor: float = 2.0
    """What the scale is multiplied by after `growth_interval` steps in a row without overflow."""
    backoff_factor: float = 0.5
    """What it is multiplied by after a step with an infinite gradient, which is left out."""
    growth_interval: int = 2000
    """Steps in a row without overflow after which it grows."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.positive(init_scale=self.init_scale)
        bounds.problems += check_number("growth_factor", self.growth_factor, 1.0, 65536.0)
        bounds.problems += check_number("backoff_factor", self.backoff_factor, 1e-3, 1.0)
        bounds.count(growth_interval=self.growth_interval)
        bounds.raise_problems()


class OptimizerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Learning rate and schedule, decay, clipping, and what single optimizers need."""

    lr: float = 3e-4
    """The highest learning rate."""
    schedule: ScheduleType = "cosine"
    """How the rate goes on after warm-up: it stays, falls in a line or a half cosine over the whole
    run, or (`wsd`) stays until the last `decay_ratio` of the run."""
    warmup_steps: int = 100
    """Steps in which the rate rises from 0 to `lr`; with 0 the first step has `lr` at once."""
    decay_ratio: float = 0.2
    """The share of all steps in which `wsd` falls."""
    decay_type: DecayType = "linear"
    """How `wsd` falls: `sqrt` is 1 - √x, steep at first (arXiv 2405.18392)."""
    min_lr_factor: float = 0.1
    """The rate at the end, as a share of `lr`."""
    betas: tuple[float, float] | None = None
    """How much of the moments each step keeps; None is 0.9 and 0.95 for AdamW, 0.9 and 0.99 for
    Lion."""
    eps: float = 1e-8
    """What AdamW adds to the root it divides by."""
    weight_decay: float = 0.1
    """Weight decay, apart from the gradient: a step takes lr × decay of each weight."""
    no_weight_decay: tuple[str, ...] = ("*bias*", "*norm*")
    """Patterns of names that do not decay; vectors never do. Add `embedding.*` to spare those."""
    groups: tuple[ParamGroupConfig, ...] = ()
    """Parameters with a rate or decay of their own."""
    clip_grad: float | None = 1.0
    """The longest gradient (L2 norm over all parameters); longer ones are shortened to it."""
    momentum: float = 0.95
    """How much of its moment SGD or Muon keeps."""
    nesterov: bool = True
    """Whether SGD and Muon look ahead by one more step of momentum."""
    muon_lr: float | None = None
    """Muon's highest learning rate; None takes `lr`, as `match-adamw` allows."""
    muon_scale: MuonScale = "match-adamw"
    """How large Muon's steps are: 0.2·√(larger side), about as large as AdamW's (arXiv
    2502.16982), or √(rows / columns), at least 1 (Keller Jordan's)."""
    muon_ns_steps: int = 5
    """Newton–Schulz steps of Muon."""
    ema_decay: float | None = None
    """How much of an average of the weights (EMA) each step keeps, such as 0.999; None has none."""
    ema_dtype: EmaDtype = "fp32"
    """Format of that average; bf16 is rounded by chance."""
    grad_scaler: GradScalerConfig = GradScalerConfig()
    """Loss scaling, which only precision fp16 uses."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.mark_unreadable(betas=self.betas, groups=self.groups, grad_scaler=self.grad_scaler)
        bounds.positive(eps=self.eps, clip_grad=self.clip_grad)
        for name, usual in (("lr", "3e-4"), ("muon_lr", "0.02")):
            if not _is_rate(rate := getattr(self, name)):
                what = f"{rate!r} is not a finite number above 0"
                bounds.add(name, what, f"use a learning rate such as {usual}")
        bounds.not_negative(weight_decay=self.weight_decay)
        bounds.count(least=0, warmup_steps=self.warmup_steps)
        bounds.count(muon_ns_steps=self.muon_ns_steps)
        bounds.one_of("schedule", self.schedule, get_args(ScheduleType))
        bounds.one_of("decay_type", self.decay_type, get_args(DecayType))
        bounds.one_of("muon_scale", self.muon_scale, get_args(MuonScale))
        bounds.one_of("ema_dtype", self.ema_dtype, get_args(EmaDtype))
        for name in ("decay_ratio", "min_lr_factor"):
            bounds.problems += check_number(name, getattr(self, name), 0.0, 1.0)
        kept: list[tuple[str, object]] = [("momentum", self.momentum)]
        kept += [("ema_decay", self.ema_decay)] if self.ema_decay is not None else []
        if bounds.is_valid("betas") and self.betas is not None:
            kept += [(f"betas[{index}]", beta) for index, beta in enumerate(self.betas)]
        for name, value in kept:
            bounds.problems += check_number(name, value, 0.0, MAX_DECAY)
        bounds.raise_problems()


def _is_rate(value: object) -> bool:
    """Say whether a learning rate can be one; None leaves it to another field."""
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 < value <= 1e300
