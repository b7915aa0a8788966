"""`MessageCosts`: what a message costs beside the wires' rates. It knows no algorithm.

`MessageCosts.physical()` has nothing but the network's own latencies. `nccl_simulation` fills in
what NCCL adds: a latency per call and hop, and the most that one channel carries.
"""

import math

import msgspec


class MessageCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies and limits of messages, inside a unit and between units."""

    name: str = "wires"
    base_s: float = 0.0
    """Once per call."""
    overhead_s: float = 0.0
    """Per message, while its lane is busy: posting it."""
    intra_hop_s: float | None = None
    """One hop inside a unit; None takes the latencies of the links on the way."""
    inter_hop_s: float | None = None
    """One hop between units."""
    intra_channel_bytes_per_s: float = math.inf
    """The most that one channel between two places of a unit carries."""
    inter_channel_bytes_per_s: float = math.inf
    """The most that one channel between units carries."""

    @classmethod
    def physical(cls, overhead_s: float = 0.0) -> "MessageCosts":
        """Return the costs of bare wires."""
        return cls(overhead_s=overhead_s)
