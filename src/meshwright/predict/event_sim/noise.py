"""What keeps real passes from being equal: jitter, slow GPUs, and experts that get more tokens.

It draws factors; what they stretch is the caller's.
"""

from math import inf

import msgspec
import numpy as np
import numpy.typing as npt

from meshwright.errors import InputError, Problem
from meshwright.predict.training_run.training_run import TrainingRun

Floats = npt.NDArray[np.float64]


class StepNoise(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How passes differ from their predicted length."""

    jitter_cv: float = 0.0
    """Coefficient of variation of a random factor with mean 1 on every pass. It is that of the
    tensor- and context-parallel GPUs which run a pass together, so of the slowest of them."""
    slow_share: float = 0.0
    """Share of GPUs that are slow for the whole step; whoever works with one is as slow."""
    slow_factor: float = 1.0
    """How many times longer passes take on a slow GPU."""
    expert_load: float = 1.0
    """Tokens of the busiest expert-parallel rank over the mean, on average over layers and
    microbatches; all others wait for it. 1 is perfect balance."""
    expert_load_cv: float = 0.0
    """Coefficient of variation of that load over layers and microbatches."""

    def __post_init__(self) -> None:
        problems = []
        for name in ("jitter_cv", "expert_load_cv"):
            if not 0 <= getattr(self, name) < inf:
                what = f"{getattr(self, name)!r} is not a coefficient of variation"
                problems.append(Problem(name, what, "use a number from 0"))
        if not 0 <= self.slow_share <= 1:
            what = f"{self.slow_share!r} is not a share of the GPUs"
            problems.append(Problem("slow_share", what, "use a number from 0 to 1"))
        for name in ("slow_factor", "expert_load"):
            if not 1 <= getattr(self, name) < inf:
                what = f"{getattr(self, name)!r} is less than no effect, or no number"
                problems.append(Problem(name, what, "use 1.1 for a tenth more"))
        if problems:
            raise InputError(problems)


NO_NOISE = StepNoise()
"""Every pass takes what is predicted."""


def count_synchronous_replicas(run: TrainingRun) -> int:
    """Return how many replicas exchange tokens between experts, and so run in step."""
    layout = run.layout
    return max(1, layout.ep * layout.effective_expert_tp // (layout.tp * layout.cp))


def sample_pass_factors(
    draw: np.random.Generator, noise: StepNoise, shape: tuple[int, ...], tied: int
) -> Floats:
    """Draw the factor of every pass: the largest of those that run it in step."""
    if not noise.jitter_cv:
        return np.ones(shape)
    # Log-normal with mean 1; of several draws the largest normal gives the largest factor.
    sigma = float(np.sqrt(np.log1p(noise.jitter_cv**2)))
    largest = draw.standard_normal(shape)
    for _ in range(tied - 1):
        np.maximum(largest, draw.standard_normal(shape), out=largest)
    factors: Floats = np.exp(sigma * largest - sigma * sigma / 2)
    return factors


def sample_rank_factors(
    draw: np.random.Generator, noise: StepNoise, shape: tuple[int, ...], gpus: int
) -> Floats:
    """Draw the factor of every pipeline rank, which is slow where one of its GPUs is."""
    chance = 1 - (1 - noise.slow_share) ** gpus
    return np.where(draw.random(shape) < chance, noise.slow_factor, 1.0)


def sample_expert_loads(
    draw: np.random.Generator, noise: StepNoise, shape: tuple[int, ...], layers: Floats
) -> Floats:
    """Draw the busiest rank's load over the mean, averaged over a chunk's layers of experts.

    The first axis counts chunks, `layers` says how many such layers each has. No load is below 1.
    """
    cv = noise.expert_load_cv / np.sqrt(np.maximum(1.0, layers))
    cv = cv.reshape(-1, *[1] * (len(shape) - 1))
    sigma = np.sqrt(np.log1p(cv * cv))
    loads: Floats = noise.expert_load * np.exp(
        sigma * draw.standard_normal(shape) - sigma * sigma / 2
    )
    return np.maximum(1.0, loads)
