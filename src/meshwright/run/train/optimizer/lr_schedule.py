"""Learning rates as a pure function of the step, so that a resumed run needs no state for them."""

import math

from meshwright.run.train.optimizer.optimizer_config import DecayType, OptimizerConfig


def compute_learning_rate(step: int, total_steps: int, settings: OptimizerConfig) -> float:
    """Return the learning rate of a step, counted from 0, of a run of `total_steps`."""
    return settings.lr * _share(step, total_steps, settings)


def _share(step: int, total_steps: int, settings: OptimizerConfig) -> float:
    warmup = min(settings.warmup_steps, total_steps)
    if step < warmup:
        return (step + 1) / warmup
    # Without a warm-up it is the first step that has the full rate, as after one of a single step.
    full = min(max(warmup, 1), total_steps)
    match settings.schedule:
        case "constant":
            return 1.0
        case "wsd":
            falling = min(round(settings.decay_ratio * total_steps), total_steps - full)
            shape = settings.decay_type
        case "linear" | "cosine" as shape:
            falling = total_steps - full
    # The last step of warm-up has the full rate, the last step of all the final one.
    done = (step + 1 - (total_steps - falling)) / max(falling, 1)
    left = _left(shape, min(max(done, 0.0), 1.0))
    return settings.min_lr_factor + (1 - settings.min_lr_factor) * left


def _left(shape: DecayType, done: float) -> float:
    """Return what is left of the rate when this share of the fall is over."""
    match shape:
        case "linear":
            return 1 - done
        case "sqrt":
            return 1 - math.sqrt(done)
        case "cosine":
            return (1 + math.cos(math.pi * done)) / 2
