"""`WandbLogger`: figures for Weights & Biases, written to the run's folder only.

The run says no command line, environment, code, repository, console or hardware of the machine it
ran on (the list of installed packages stays beside it), and its configuration no secrets.
"""

import hashlib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from meshwright.errors import MissingDependency
from meshwright.redaction import redact_secrets
from meshwright.run.train.logging.logger import StepMetricValues
from meshwright.run.train.logging.logging_config import WandbConfig

_PRIVATE = {
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "save_code": False,
    "silent": True,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
}


class WandbLogger:
    """Writes a run that `wandb sync` can upload."""

    def __init__(self, folder: Path, settings: WandbConfig, config: Mapping[str, Any]) -> None:
        try:
            wandb = import_module("wandb")
        except ImportError:
            hint = "pip install wandb"
            raise MissingDependency("the Weights & Biases output needs wandb", hint) from None
        folder.mkdir(parents=True, exist_ok=True)
        # Older releases know fewer of these, and refuse what they do not know.
        known = getattr(wandb.Settings, "model_fields", _PRIVATE)
        private = {name: value for name, value in _PRIVATE.items() if name in known}
        self._run = wandb.init(
            mode="offline",
            dir=str(folder),
            project=settings.project,
            name=settings.name or folder.resolve().name,
            # The same folder is the same run, also after it was resumed.
            id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16],
            config=redact_secrets(config),
            settings=wandb.Settings(**private),
        )

    def write(self, step: int, figures: StepMetricValues) -> None:
        """Write the figures of a step."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Finish the run's file."""
        self._run.finish()
