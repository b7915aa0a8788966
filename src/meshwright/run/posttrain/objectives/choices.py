"""Choices of an objective, by the names that settings have too; needs no torch."""

from typing import Literal

LossAggregation = Literal["token", "sequence", "constant"]
"""token     every token counts the same (DAPO, arXiv 2503.14476 Eq. 8)
sequence  every sequence counts the same (GRPO, arXiv 2402.03300 Eq. 3)
constant  every token counts 1 / longest of a sequence (Dr. GRPO, arXiv 2503.20783 §3.2)"""
CorrectionLevel = Literal["token", "sequence", "mean"]
"""Over what r is taken: a token; the product over its sequence; the sequence's geometric mean."""
KLEstimator = Literal["k1", "k2", "k3"]
"""Schulman's estimators; `kl_penalty` has their formulas."""
