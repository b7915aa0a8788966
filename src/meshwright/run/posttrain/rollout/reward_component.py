"""`RewardComponent`: one part of a reward, and the verifier that gave it."""

from typing import Literal

import msgspec

VerifierOutcome = Literal["ok", "timeout", "memory", "output", "error", "died"]
"""How a verifier ended: with a score, or by one of its limits."""


class RewardComponent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One part of a reward, and who says so."""

    name: str
    value: float
    weight: float = 1.0
    reason: str = ""
    """Why, in the verifier's words; where it failed, what happened."""
    verifier: str = ""
    """`module:function` that judged; empty where the environment knew by itself."""
    fingerprint: str = ""
    """A digest of the verifier's module: tells apart what judged before and after a change."""
    outcome: VerifierOutcome = "ok"
    duration_s: float = 0.0
    """Seconds from the start of the judgement to its end, not counting the wait for a process."""
    is_final: bool = False
    """Whether it counts where it failed: what the verifier ran was the model's, and earns 0."""

    @property
    def has_reward(self) -> bool:
        """Whether its value means something."""
        return self.outcome == "ok" or self.is_final
