"""`ExitReason`: why a rank ends, told to whoever started it, who says it once for all of them.

`mw train --nproc-per-node` hands its ranks the end of a pipe. Of ranks that end for one cause each
tells it there, and not to the terminal; without such a pipe a rank speaks for itself. Loads no
torch.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

WATCHDOG_EXIT_CODE = 4
"""Exit code of ranks that end because of another, and of a job that lost one."""
EXIT_REASON_FD_VARIABLE = "MESHWRIGHT_EXIT_REASON_FD"
"""Number of the open pipe that last words are written to."""
_MOST_BYTES = 4096
"""What Linux writes to a pipe as one piece (PIPE_BUF): words of two ranks are not mixed."""
_MOST_TEXT = 1500


class ExitReason(NamedTuple):
    """What one rank tells."""

    rank: int
    culprit_ranks: tuple[int, ...]
    """Ranks that are to blame, by what this one knows."""
    message: str
    """Why, in a line."""


def send_exit_reason(
    rank: int, culprits: Sequence[int], text: str, environment: Mapping[str, str] = os.environ
) -> bool:
    """Tell the starter why a rank ends; False where nobody listens."""
    number = environment.get(EXIT_REASON_FD_VARIABLE, "")
    if not number.isdecimal():
        return False
    line = text.partition("\n")[0][:_MOST_TEXT]
    raw = json.dumps([rank, list(culprits)[:64], line]).encode() + b"\n"
    if len(raw) > _MOST_BYTES:
        return False
    with suppress(OSError):
        return os.write(int(number), raw) == len(raw)
    return False


def read_exit_reasons(raw: bytes) -> list[ExitReason]:
    """Read what ranks have told, first come first; what is no message is left out."""
    found = []
    for line in raw.splitlines():
        with suppress(ValueError, TypeError):
            rank, culprits, text = json.loads(line)
            found.append(ExitReason(rank, tuple(culprits), text))
    return found
