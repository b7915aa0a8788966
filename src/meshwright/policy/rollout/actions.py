"""What a driver is told to do, and what idle sides wait for."""

from typing import Literal, NamedTuple

MemoryPhase = Literal["sleep", "load", "offload", "wake weights", "wake cache"]
"""Turns of GPUs that both sides share. `sleep`: engines give up their cache and weights. `load`:
the optimizer's states come back to the GPUs, and what else only training needs. `offload`: all of
it leaves. `wake weights`: engines have room for weights again, which are synced before `wake cache`
gives them one: old and new weights and a full cache never lie side by side."""
BEFORE_TRAINING: tuple[MemoryPhase, ...] = ("sleep", "load")
BEFORE_SYNC: tuple[MemoryPhase, ...] = ("offload", "wake weights")
AFTER_SYNC: tuple[MemoryPhase, ...] = ("wake cache",)

IdleCause = Literal["groups", "drain", "weights", "staleness", "memory", "end"]
"""`groups`: the trainer has too few to begin a step. `drain`: a sync begins once nothing runs.
`weights`: engines stand still while weights come in. `staleness`: more would be too old when it is
trained on. `memory`: the other side has the GPUs. `end`: everything that was asked for is under
way, or done."""


class GenerateAction(NamedTuple):
    """Answer the prompt of one group, all its samples."""

    group: int
    """Which of the prompts, in their order."""
    attempt: int
    """How often it was begun before."""
    version: int
    """Of the weights it begins with: how many steps they were trained."""


class DropAction(NamedTuple):
    """Let a group go that would be too old, or is of no use; if it still runs, stop it."""

    group: int
    attempt: int
    version: int
    is_running: bool
    requeue: bool
    """Whether the prompt is answered anew."""
    no_signal: bool = False
    """Whether it is of no use, so that a further prompt takes its place."""


class TrainAction(NamedTuple):
    """Take one step on these groups."""

    step: int
    groups: tuple[int, ...]
    """In the order of their prompts, however they ended."""
    versions: tuple[int, ...]
    """The weights that each of them began with."""
    replaced_groups: int = 0
    """Groups of no use that further prompts took the place of, since the step before began."""


class SyncAction(NamedTuple):
    """Give the engines the trainer's weights; who generates meanwhile stands still."""

    version: int


class MemoryPhaseAction(NamedTuple):
    """Move memory, where both sides share GPUs."""

    phase: MemoryPhase


Action = GenerateAction | DropAction | TrainAction | SyncAction | MemoryPhaseAction


class IdleReason(NamedTuple):
    """A side that does nothing, and why."""

    side: Literal["trainer", "engines"]
    cause: IdleCause
    groups: tuple[int, ...] = ()
    """Those that have to end before it goes on, where it waits for any."""

    def __str__(self) -> str:
        """Say it in words."""
        said = "the trainer waits" if self.side == "trainer" else "engines wait"
        if not self.groups:
            return f"{said}: {self.cause}"
        listed = ", ".join(str(group) for group in self.groups[:4])
        more = len(self.groups) - 4
        listed += f" and {more} more" if more > 0 else ""
        return f"{said}: {self.cause}, for groups {listed}"
