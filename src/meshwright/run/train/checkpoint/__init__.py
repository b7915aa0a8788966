"""Checkpoints that survive a crash at any byte, load under any layout and run no code.

Checkpoints            saves and loads the state of a run
CheckpointSettings     when, how, and which ones stay
CheckpointReader       the same folders for torch's distributed checkpoint
Found, Loaded, Staged  a checkpoint on the disk, what a load brought back, what a save cost
CheckpointFailed       a save that did not come to its end
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.train.checkpoint.checkpoints import Checkpoints, Staged
    from meshwright.run.train.checkpoint.folder import Found
    from meshwright.run.train.checkpoint.loading import Loaded
    from meshwright.run.train.checkpoint.reader import CheckpointReader
    from meshwright.run.train.checkpoint.settings import CheckpointSettings
    from meshwright.run.train.checkpoint.writing import CheckpointFailed

_HOMES = {
    "CheckpointFailed": "meshwright.run.train.checkpoint.writing",
    "CheckpointReader": "meshwright.run.train.checkpoint.reader",
    "CheckpointSettings": "meshwright.run.train.checkpoint.settings",
    "Checkpoints": "meshwright.run.train.checkpoint.checkpoints",
    "Found": "meshwright.run.train.checkpoint.folder",
    "Loaded": "meshwright.run.train.checkpoint.loading",
    "Staged": "meshwright.run.train.checkpoint.checkpoints",
}

__all__ = [
    "CheckpointFailed",
    "CheckpointReader",
    "CheckpointSettings",
    "Checkpoints",
    "Found",
    "Loaded",
    "Staged",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
