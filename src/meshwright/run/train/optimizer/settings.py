"""`OptimizerSettings`: how weights are updated. The layout names the optimizer and its formats."""

from typing import Literal, get_args

import msgspec

from meshwright.spec.bounds import Bounds, real

ScheduleShape = Literal["constant", "linear", "cosine", "wsd"]
DecayShape = Literal["linear", "sqrt", "cosine"]
MuonScale = Literal["match-adamw", "spectral"]
AveragePrecision = Literal["fp32", "bf16"]

MOST_KEPT = 0.999999
"""The largest share of a moment or average that a step may keep."""


class ParameterGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is different for the parameters of some names."""

    match: str
    """A pattern of names with * and ?, such as `embedding.*`; the first group to match counts."""
    lr_share: float = 1.0
    """What the learning rate is multiplied by; decay, which it scales, follows."""
    decay: float | None = None
    """Weight decay; None leaves what it would be without this group."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.named(match=self.match)
        bounds.not_negative(lr_share=self.lr_share, decay=self.decay)
        bounds.require()


class LossScaleSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How losses are scaled in fp16, whose gradients would vanish below 6e-8 (arXiv 1710.03740)."""

    first: float = 65536.0
    """What the loss is multiplied by at the start."""
    growth: float = 2.0
    """What the scale is multiplied by after `growth_steps` sound steps in a row."""
    backoff: float = 0.5
    """What it is multiplied by after a step with an infinite gradient, which is left out."""
    growth_steps: int = 2000
    """Sound steps in a row that let it grow."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.positive(first=self.first)
        bounds.problems += real("growth", self.growth, 1.0, 65536.0)
        bounds.problems += real("backoff", self.backoff, 1e-3, 1.0)
        bounds.count(growth_steps=self.growth_steps)
        bounds.require()


class OptimizerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Learning rate and schedule, decay, clipping, and what single optimizers need."""

    lr: float = 3e-4
    """The highest learning rate."""
    schedule: ScheduleShape = "cosine"
    """How the rate goes on after warm-up: it stays, falls in a line or a half cosine over the whole
    run, or (`wsd`) stays until the last `decay_share` of the run."""
    warmup_steps: int = 100
    """Steps in which the rate rises from nought to `lr`; with 0 the first step has `lr` at once."""
    decay_share: float = 0.2
    """The share of all steps in which `wsd` falls."""
    decay_shape: DecayShape = "linear"
    """How `wsd` falls: `sqrt` is 1 - √x, steep at first (arXiv 2405.18392)."""
    final_share: float = 0.1
    """The rate at the end, as a share of `lr`."""
    betas: tuple[float, float] | None = None
    """How much of the moments each step keeps; None is 0.9 and 0.95 for AdamW, 0.9 and 0.99 for
    Lion."""
    eps: float = 1e-8
    """What AdamW adds to the root it divides by."""
    decay: float = 0.1
    """Weight decay, apart from the gradient: a step takes lr × decay of each weight."""
    no_decay: tuple[str, ...] = ("*bias*", "*norm*")
    """Patterns of names that do not decay; vectors never do. Add `embedding.*` to spare those."""
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with a rate or decay of their own."""
    clip: float | None = 1.0
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
    muon_steps: int = 5
    """Newton–Schulz steps of Muon."""
    average: float | None = None
    """How much of an average of the weights (EMA) each step keeps, such as 0.999; None has none."""
    average_precision: AveragePrecision = "fp32"
    """Format of that average; bf16 is rounded by chance."""
    loss_scale: LossScaleSettings = LossScaleSettings()
    """Loss scaling, which only precision fp16 uses."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.readable(betas=self.betas, groups=self.groups, loss_scale=self.loss_scale)
        bounds.positive(lr=self.lr, eps=self.eps, clip=self.clip, muon_lr=self.muon_lr)
        bounds.not_negative(decay=self.decay)
        bounds.count(least=0, warmup_steps=self.warmup_steps)
        bounds.count(muon_steps=self.muon_steps)
        bounds.one_of("schedule", self.schedule, get_args(ScheduleShape))
        bounds.one_of("decay_shape", self.decay_shape, get_args(DecayShape))
        bounds.one_of("muon_scale", self.muon_scale, get_args(MuonScale))
        bounds.one_of("average_precision", self.average_precision, get_args(AveragePrecision))
        for name in ("decay_share", "final_share"):
            bounds.problems += real(name, getattr(self, name), 0.0, 1.0)
        kept: list[tuple[str, object]] = [("momentum", self.momentum)]
        kept += [("average", self.average)] if self.average is not None else []
        if bounds.sound("betas") and self.betas is not None:
            kept += [(f"betas[{index}]", beta) for index, beta in enumerate(self.betas)]
        for name, value in kept:
            bounds.problems += real(name, value, 0.0, MOST_KEPT)
        bounds.require()
