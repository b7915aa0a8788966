"""What the moves of a collective are called in a timeline, whether simulated or measured.

A rank has one lane per peer, channel and direction, and one for what it does by itself. A span is
named for what becomes of the chunks where they arrive, at both ends. Its details name the rank's
own slot: the first that is read, or that a receive writes. Knows words, no clock.
"""

from typing import Literal

TransferDirection = Literal["send", "receive", "local"]
"""From a rank to another, from another to it, or within it."""

SPAN_NAMES = ("copy", "add")
"""Names of spans, by whether the chunks are added to what lies there."""
TORCH_CALLS: dict[TransferDirection, str | None] = {
    "send": "send",
    "receive": "recv",
    "local": None,
}
"""The operation that a span is part of, as traces of torch call it."""


def format_lane_name(way: TransferDirection, peer: int, channel: int) -> str:
    """Return the lane that a message is drawn on."""
    if way == "local":
        return "local"
    return f"{way} {'to' if way == 'send' else 'from'} {peer}, channel {channel}"


def encode_span_details(step: int, slot: int, chunks: int) -> str:
    """Return what else is known of a span, as JSON; part of a chunk counts as one."""
    return f'{{"step":{step},"slot":{slot},"chunks":{chunks}}}'
