"""The environment of a watched job: by it the hook reaches every process of Python."""

import os
from collections.abc import Mapping
from pathlib import Path

from meshwright.observe.watch.folder import Folder

INJECT = Path(__file__).with_name("agent") / "inject"
"""The folder that goes first on PYTHONPATH."""
TEARDOWN = "TEARDOWN_CUPTI"
"""Has the profiler let go of the driver after every capture. Otherwise the driver goes on reporting
every launch: after one capture an H200 took 20 to 25 % longer for steps that the host sets the pace
of (2026-11-16, torch 2.11), and nothing longer for steps that fill the device. Graphs
do not stand it before CUDA 12.6: PyTorch unsets it for those of its compiler, the agent for others.
"""

OURS = "MESHWRIGHT_WATCH_TEARDOWN"
"""Says that the watch has set it, not the job."""


def environment(base: Mapping[str, str], folder: Folder) -> dict[str, str]:
    """Return the environment of the job; what is set there already stays as it is."""
    path = base.get("PYTHONPATH", "")
    ours = {} if TEARDOWN in base else {TEARDOWN: "1", OURS: "1"}
    return (
        dict(base)
        | ours
        | {
            "MESHWRIGHT_WATCH": str(folder.path),
            "PYTHONPATH": f"{INJECT}{os.pathsep}{path}" if path else str(INJECT),
        }
    )
