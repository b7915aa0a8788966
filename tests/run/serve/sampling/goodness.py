"""Are draws from a distribution? The chi-square test, in units of a normal deviation."""

import numpy as np
import torch

# Draws from the right distribution are this far off once in 30,000 tests; seeds are fixed anyway.
LIMIT = 4.0


def deviation(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Return how far draws are from `probabilities`, by Wilson and Hilferty's normal deviation."""
    counts = np.bincount(tokens.cpu().numpy(), minlength=len(probabilities)).astype(float)
    expected = probabilities.double().cpu().numpy() * len(tokens)
    assert counts[expected == 0].sum() == 0
    # Chi-square is off where few are expected: such tokens are counted together.
    rare = expected < 5
    if expected[rare].sum() >= 5:
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    else:
        counts, expected = counts[~rare], expected[~rare]
    freedom = len(counts) - 1
    assert freedom > 0
    ratio = float(((counts - expected) ** 2 / expected).sum()) / freedom
    spread = 2 / (9 * freedom)
    return float((np.cbrt(ratio) - (1 - spread)) / np.sqrt(spread))
