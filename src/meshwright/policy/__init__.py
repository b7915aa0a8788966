"""Who goes when: decisions as plain values, without torch and without a clock.

    pipeline    the order in which pipeline ranks run forwards, backwards and transfers

The trainer carries these values out; the predictor gives each step of them a duration.
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.policy import pipeline

__all__ = ["pipeline"]

__getattr__, __dir__ = lazy_names(__name__, {"pipeline": "meshwright.policy.pipeline"})
