"""The name under which simulations know `streamed`; how it works is the algorithms' own affair."""

from meshwright.policy.collective.streaming import WHOLE, streamed

__all__ = ["WHOLE", "streamed"]
