"""Has torch's flight recorder record, and dump where the watcher looks, unless the job said else.

Set inside the process, once it is known which torch it is: its versions know different names, and
newer ones warn of the older names.
"""

import os
import re
from collections.abc import Mapping

_RENAMED = (2, 9)
"""From here on `TORCH_FR_…` are the names of what was `TORCH_NCCL_…` before."""


def build_flight_recorder_env(
    given: Mapping[str, str], version: str, flight: str
) -> dict[str, str]:
    """Return what to add to an environment; `flight` is the folder for dumps."""
    new = _numbers(version) >= _RENAMED
    found = {}
    sizes = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    files = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    for names, value in ((sizes, "2000"), (files, os.path.join(flight, "rank_"))):  # noqa: PTH118
        if not any(name in given for name in names):
            found[names[0] if new else names[1]] = value
    if "TORCH_NCCL_DUMP_ON_TIMEOUT" not in given:
        found["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    # NCCL's own thread dumps when something is written to this pipe, also when Python is stuck.
    # A process group would fail where it cannot be made, so that is tried first.
    if "TORCH_NCCL_DEBUG_INFO_PIPE_FILE" not in given and _has_pipes(flight):
        found["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] = os.path.join(flight, "pipe_")  # noqa: PTH118
    # Kineto would tell the job's stderr of every capture.
    if "KINETO_LOG_LEVEL" not in given:
        found["KINETO_LOG_LEVEL"] = "99"
    return found


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _has_pipes(folder: str) -> bool:
    path = os.path.join(folder, f"try-{os.getpid()}")  # noqa: PTH118
    try:
        os.mkfifo(path, 0o600)
        os.unlink(path)  # noqa: PTH108
    except OSError:
        return False
    return True
