"""What the passes of a pipeline are called in a timeline, whether simulated or measured.

A rank's passes lie on one lane of its host, each with its stage, microbatch and the first layer of
its chunk; those that a simulated device runs beside another have a lane of their own. Knows words,
no clock.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright.spec.layout import ModelChunk

PASS_NAMES = {"F": "forward", "B": "backward", "I": "backward-input", "W": "backward-weight"}
"""What a pass is called, by what an action does."""
PROCESS = "host"
LANE = "forward-backward"
OVERLAPPED_LANE = "forward-backward overlapped"


def encode_span_details(chunk: "ModelChunk") -> str:
    """Return what else is known of a pass, as JSON; layers from the first to one past the last."""
    return f'{{"chunk":{chunk.position},"layers":[{chunk.first},{chunk.last}]}}'
