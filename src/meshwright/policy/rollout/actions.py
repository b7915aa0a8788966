"""What a driver is told to do, and what idle sides wait for."""

from typing import Literal, NamedTuple

PhaseName = Literal["sleep", "load", "offload", "wake weights", "wake cache"]
"""Turns of GPUs that both sides share. `sleep`: engines give up their cache and weights. `load`:
the optimizer's states come back to the GPUs, and what else only training needs. `offload`: all of
it leaves. `wake weights`: engines have room for weights again, which are synced before `wake cache`
gives them one: old and new weights and a full cache never lie side by side."""
BEFORE_TRAINING: tuple[PhaseName, ...] = ("sleep", "load")
BEFORE_SYNC: tuple[PhaseName, ...] = ("offload", "wake weights")
AFTER_SYNC: tuple[PhaseName, ...] = ("wake cache",)

WaitName = Literal["groups", "drain", "weights", "staleness", "memory", "end"]
"""`groups`: the trainer has too few to begin a step. `drain`: a sync begins once nothing runs.
`weights`: engines stand still while weights come in. `staleness`: more would be too old when it is
trained on. `memory`: the other side has the GPUs. `end`: everything that was asked for is under
way, or done."""


class Generate(NamedTuple):
    """Answer the prompt of one group, all its samples."""

    group: int
    """Which of the prompts, in their order."""
    attempt: int
    """How often it was begun before."""
    version: int
    """Of the weights it begins with: how many steps they were trained."""


class Drop(NamedTuple):
    """Let a group go that would be too old, or is of no use; if it still runs, stop it."""

    group: int
    attempt: int
    version: int
    running: bool
    again: bool
    """Whether the prompt is answered anew."""
    useless: bool = False
    """Whether it is of no use, so that a further prompt takes its place."""


class Train(NamedTuple):
    """Take one step on these groups."""

    step: int
    groups: tuple[int, ...]
    """In the order of their prompts, however they ended."""
    versions: tuple[int, ...]
    """The weights that each of them began with."""
    replaced: int = 0
    """Groups of no use that further prompts took the place of, since the step before began."""


class Sync(NamedTuple):
    """Give the engines the trainer's weights; who generates meanwhile stands still."""

    version: int


class Phase(NamedTuple):
    """Move memory, where both sides share GPUs."""

    name: PhaseName


Action = Generate | Drop | Train | Sync | Phase


class Wait(NamedTuple):
    """A side that does nothing, and why."""

    who: Literal["trainer", "engines"]
    name: WaitName
    groups: tuple[int, ...] = ()
    """Those that have to end before it goes on, where it waits for any."""

    def __str__(self) -> str:
        """Say it in words."""
        said = "the trainer waits" if self.who == "trainer" else "engines wait"
        if not self.groups:
            return f"{said}: {self.name}"
        listed = ", ".join(str(group) for group in self.groups[:4])
        more = len(self.groups) - 4
        listed += f" and {more} more" if more > 0 else ""
        return f"{said}: {self.name}, for groups {listed}"
