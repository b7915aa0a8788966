"""Checkpoints that survive a crash at any byte, load under any layout and run no code.

CheckpointManager     saves and loads the state of a run
CheckpointConfig      when, how, and which ones stay
CheckpointReader      the same folders for torch's distributed checkpoint
SavedCheckpoint       a checkpoint on the disk
LoadResult            the result of a load
SaveTiming            the cost of a save
CheckpointSaveError   a save that did not complete
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.train.checkpoint.async_save import CheckpointSaveError
    from meshwright.run.train.checkpoint.checkpoint_config import CheckpointConfig
    from meshwright.run.train.checkpoint.checkpoint_folder import SavedCheckpoint
    from meshwright.run.train.checkpoint.checkpoint_loader import LoadResult
    from meshwright.run.train.checkpoint.dcp_reader import CheckpointReader
    from meshwright.run.train.checkpoint.manager import CheckpointManager, SaveTiming

_MODULES = {
    "CheckpointSaveError": "meshwright.run.train.checkpoint.async_save",
    "CheckpointReader": "meshwright.run.train.checkpoint.dcp_reader",
    "CheckpointConfig": "meshwright.run.train.checkpoint.checkpoint_config",
    "CheckpointManager": "meshwright.run.train.checkpoint.manager",
    "SavedCheckpoint": "meshwright.run.train.checkpoint.checkpoint_folder",
    "LoadResult": "meshwright.run.train.checkpoint.checkpoint_loader",
    "SaveTiming": "meshwright.run.train.checkpoint.manager",
}

__all__ = [
    "CheckpointConfig",
    "CheckpointManager",
    "CheckpointReader",
    "CheckpointSaveError",
    "LoadResult",
    "SaveTiming",
    "SavedCheckpoint",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
