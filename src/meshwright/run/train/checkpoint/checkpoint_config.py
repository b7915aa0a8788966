"""`CheckpointConfig`: when a run saves, what it keeps, and how much it checks."""

from typing import Literal, get_args

import msgspec

from meshwright.spec.field_checks import FieldChecker

VerifyMode = Literal["sizes", "checksum-load", "checksum-save-load"]
OnDamaged = Literal["previous", "error"]


class CheckpointConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When checkpoints are written, how, and which of them stay."""

    every_steps: int | None = 1000
    """Steps between two checkpoints; None saves only where the run asks for it."""
    keep_last: int = 2
    """How many of the newest sound checkpoints stay. Two, so that one can be damaged."""
    keep_every: int | None = None
    """Checkpoints of steps that divide by this stay for good; None keeps none beyond the last."""
    async_save: bool = True
    """Whether training goes on while the copy in host memory is written."""
    verify: VerifyMode = "checksum-load"
    """What is checked: only the sizes of files, every checksum before a load, or every checksum
    also before the commit of a save, read back from the disk."""
    on_damaged: OnDamaged = "previous"
    """Whether loading the latest one goes on to the one before it, with a warning, or refuses."""
    staging_bytes: int | None = None
    """Most host memory that copies may take in each process; None takes what one checkpoint needs.
    With less, training waits while the rest is written."""
    threads: int = 4
    """Threads of each process that write, read and compute checksums."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(
            every_steps=self.every_steps,
            keep_last=self.keep_last,
            keep_every=self.keep_every,
            threads=self.threads,
        )
        bounds.count(2**20, staging_bytes=self.staging_bytes)
        bounds.one_of("verify", self.verify, get_args(VerifyMode))
        bounds.one_of("on_damaged", self.on_damaged, get_args(OnDamaged))
        bounds.raise_problems()

    def should_save(self, step: int) -> bool:
        """Tell whether a checkpoint is written after this step."""
        return self.every_steps is not None and step > 0 and step % self.every_steps == 0
