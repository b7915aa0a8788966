"""How sure a prediction is: the range in which nine of ten published steps lie.

Doubt grows with what is hard to foresee: communication that does not hide, experts whose layers a
host may pace, scans. It reaches further up than down, as what a model leaves out makes steps
longer. The constants are widths found on published runs, not standard errors.
"""

import math

import msgspec

from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.model import GatedDeltaNetSpec, Mamba2Spec, MoESpec


class IntervalWidths(msgspec.Struct, frozen=True, kw_only=True):
    """Widths of the interval, as logarithms of measured over predicted."""

    base: float = 0.13
    """Either way, for any step."""
    exposed_up: float = 1.0
    """Up, per share of the step spent on communication, that of experts apart, that does not
    hide."""
    experts_down: float = 0.13
    """Down, where layers have experts: newer kernels and CUDA graphs."""
    experts_up: float = 0.45
    """Up, where layers have experts: the host's pace, routing out of balance."""
    scans_up: float = 0.45
    """Up, where layers have scans, which few published runs time."""


INTERVAL_WIDTHS = IntervalWidths()


def predict_interval(
    run: TrainingRun, step_s: float, exposed_s: float, doubt: IntervalWidths = INTERVAL_WIDTHS
) -> tuple[float, float]:
    """Return the seconds between which nine of ten such steps lie.

    `exposed_s` is the part of the step spent on communication that does not hide.
    """
    blocks = run.model.blocks
    experts = any(isinstance(block.mlp, MoESpec) for block in blocks)
    scans = any(isinstance(block.mixer, Mamba2Spec | GatedDeltaNetSpec) for block in blocks)
    down = doubt.base + experts * doubt.experts_down
    up = doubt.base + doubt.exposed_up * exposed_s / step_s
    up += experts * doubt.experts_up + scans * doubt.scans_up
    return step_s * math.exp(-down), step_s * math.exp(up)
