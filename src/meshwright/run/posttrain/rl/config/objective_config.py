"""`ObjectiveConfig`: what a step of reinforcement learning minimises, by the names of its parts.

Whoever reads settings needs no torch.
"""

from typing import Literal, get_args

import msgspec

from meshwright.run.posttrain.objectives.choices import (
    CorrectionLevel,
    KLEstimator,
    LossAggregation,
)
from meshwright.spec.field_checks import FieldChecker, check_number

AdvantageEstimator = Literal[
    "z-scored", "centred", "leave-one-out", "whitened", "centred-whitened", "gae"
]  # fmt: skip
PolicyLossName = Literal["clip", "gspo", "cispo", "reinforce"]
ImportanceCorrection = Literal["none", "truncated", "masked"]

_BOUNDS = {"clip": (0.2, 0.2), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0), "reinforce": (0.0, 0.0)}
"""What each loss's paper uses."""


class CriticConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the policy's shape that learns what answers will come to (PPO)."""

    lr: float | None = None
    """The highest learning rate; None is the policy's. Its schedule is the policy's too."""
    gae_lambda: float = 0.95
    """λ of generalised advantages: 1 trusts rewards alone, 0 the critic."""
    clip: float | None = None
    """How far a step may move values, as PPO's implementations bound them; None sets no bound."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.positive(lr=self.lr, clip=self.clip)
        bounds.problems += check_number("gae_lambda", self.gae_lambda, 0.0, 1.0)
        bounds.raise_problems()


class ObjectiveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is minimised; `run.posttrain.objectives` has the formulas and their papers."""

    adv_estimator: AdvantageEstimator = "z-scored"
    """Over the other answers to a prompt: z-scored (GRPO), centred (Dr. GRPO), leave-one-out
    (RLOO). Over all tokens of a step: whitened (REINFORCE++), centred-whitened (its variant with
    the group's mean). Over a critic's values: gae (PPO)."""
    gamma: float = 1.0
    """What a reward counts one token earlier; whitened and gae."""
    loss: PolicyLossName = "clip"
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    """Bounds of the ratio, as distances from 1; None is what the loss's paper uses."""
    dual_clip: float | None = None
    """The most that the ratio counts where the advantage is negative; clip and gspo."""
    loss_agg_mode: LossAggregation = "token"
    minibatches: int = 1
    """Updates for the rollouts of one step, each on its share of them."""
    kl_coef: float = 0.0
    """Strength of the pull to the weights before the first step."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether it is added to the loss or taken off rewards: there of single tokens where these
    have advantages of their own (whitened, gae), of whole answers otherwise."""
    kl_estimator: KLEstimator | None = None
    """How it is estimated; None is k2 in the loss and k1 in the reward."""
    kl_weighted: bool = False
    """In the loss: times the ratio with its gradient (k1, k3), which then pulls as KL does."""
    importance_correction: ImportanceCorrection = "none"
    """Weight against an engine whose numbers differ. `none` takes ratios to the engine's own
    log-probabilities; the others take them to the trainer's, computed once more before the step,
    and weigh tokens by trainer over engine."""
    correction_cap: float = 2.0
    """The highest weight; tokens beyond it, or below its inverse, are cut or left out."""
    correction_level: CorrectionLevel = "token"
    """Over what the weight is taken: a token, its whole answer, or the answer's mean."""
    overlong_buffer: int | None = None
    """Tokens before the longest answer from which on rewards fall, to 1 less at its end (DAPO's
    overlong penalty); None takes nothing off."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.one_of("adv_estimator", self.adv_estimator, get_args(AdvantageEstimator))
        bounds.one_of("loss", self.loss, get_args(PolicyLossName))
        bounds.one_of("loss_agg_mode", self.loss_agg_mode, get_args(LossAggregation))
        bounds.one_of(
            "importance_correction", self.importance_correction, get_args(ImportanceCorrection)
        )
        bounds.one_of("correction_level", self.correction_level, get_args(CorrectionLevel))
        bounds.one_of("kl_in", self.kl_in, ("loss", "reward"))
        if self.kl_estimator is not None:
            bounds.one_of("kl_estimator", self.kl_estimator, get_args(KLEstimator))
        bounds.count(minibatches=self.minibatches, overlong_buffer=self.overlong_buffer)
        bounds.not_negative(kl_coef=self.kl_coef)
        bounds.problems += check_number("gamma", self.gamma, 0.0, 1.0)
        bounds.problems += check_number("correction_cap", self.correction_cap, 1.0, 1e6)
        if bounds.is_valid("loss"):
            self._check_bounds(bounds)
        if bounds.is_valid("kl_in", "kl_estimator"):
            self._check_kl(bounds)
        sound = bounds.is_valid("loss", "minibatches")
        if sound and self.loss == "reinforce" and self.minibatches > 1:
            what = "after the first update answers are not the policy's own any more"
            bounds.add("minibatches", what, "use 1 with reinforce, or the loss clip")
        bounds.raise_problems()

    def _check_bounds(self, bounds: FieldChecker) -> None:
        if self.clip_ratio_low is not None:
            most = 1.0 if self.loss == "cispo" else 0.999
            bounds.problems += check_number("clip_ratio_low", self.clip_ratio_low, 0.0, most)
        if self.clip_ratio_high is not None:
            bounds.problems += check_number("clip_ratio_high", self.clip_ratio_high, 0.0, 100.0)
        if self.dual_clip is None:
            return
        if self.loss not in ("clip", "gspo"):
            bounds.add("dual_clip", f"{self.loss} has no such bound", "leave it out, or use clip")
        elif bounds.is_valid("clip_ratio_high"):
            bounds.positive(dual_clip=self.dual_clip)
            least = 1 + self.ratio_bounds[1]
            if bounds.is_valid("dual_clip") and self.dual_clip <= least:
                what = f"{self.dual_clip:g} is within the bound of the ratio, {least:g}"
                bounds.add("dual_clip", what, f"use more than {least:g}, such as 3")

    def _check_kl(self, bounds: FieldChecker) -> None:
        if self.kl_in == "reward":
            if self.kl_weighted:
                what = "what is taken off rewards has no ratio"
                bounds.add("kl_weighted", what, "leave it out, or use the loss")
        elif self.kl_estimator == "k1" and not self.kl_weighted:
            what = "in the loss the gradient of k1 is 0 on average: it would pull to nothing"
            bounds.add("kl_estimator", what, "use k2 or k3, kl_weighted, or kl_in = reward")
        elif self.kl_weighted and self.resolved_kl_estimator == "k2":
            bounds.add("kl_weighted", "k2 times a ratio estimates no KL", "use kl_estimator = k3")

    @property
    def ratio_bounds(self) -> tuple[float, float]:
        """How far below and above 1 a ratio may be."""
        low, high = _BOUNDS[self.loss]
        return (
            low if self.clip_ratio_low is None else self.clip_ratio_low,
            high if self.clip_ratio_high is None else self.clip_ratio_high,
        )

    @property
    def resolved_kl_estimator(self) -> KLEstimator:
        """How KL is estimated."""
        return self.kl_estimator or ("k2" if self.kl_in == "loss" else "k1")

    @property
    def is_group_relative(self) -> bool:
        """Whether answers are held against others to their prompt: equal ones teach nothing."""
        return self.adv_estimator not in ("whitened", "gae")
