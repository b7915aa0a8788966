"""`Status`: what one rank says of itself to the others, and `Seen`, an entry of its journal."""

from typing import Literal, Self

import msgspec

from meshwright.run.parallel.journal import Entry

State = Literal["runs", "raised", "lost", "left"]
"""`lost` is a rank whose way to another broke, `left` one that has done its work."""


class Seen(msgspec.Struct, frozen=True):
    """An entry of a journal, as another process reads it."""

    number: int
    elements: int
    same_size: bool
    dtype: str
    op: str
    group: str
    where: str
    first: int = 0
    """The first rank of its group."""

    def __str__(self) -> str:
        what = f"{self.op} number {self.number} of group {self.group}, {self.elements:,} elements"
        return f"{what} of {self.dtype.removeprefix('torch.')}, at {self.where or 'no known line'}"

    @property
    def mark(self) -> tuple[str, str, int]:
        """What must be the same on all members."""
        return self.op, self.dtype, self.elements if self.same_size else 0

    @classmethod
    def of(cls, entry: Entry) -> Self:
        """Return an entry in words."""
        return cls(
            entry.number,
            entry.elements,
            entry.same_size,
            str(entry.dtype),
            entry.op,
            entry.group,
            "" if entry.where is None else str(entry.where),
            entry.first,
        )

    @classmethod
    def on(cls, board: bytes) -> Self | None:
        """Return what stands on a board; None where nothing does, or only a part of it."""
        words = board.rstrip(b"\0").decode(errors="replace").split("\t")
        if len(words) < 7 or not all(word.isdigit() for word in words[:4]):
            return None
        number, elements, same_size, first = (int(word) for word in words[:4])
        dtype, op, group, *place = words[4:]
        where = f"{place[0]}:{place[1]} ({place[2]})" if len(place) == 3 else ""
        return cls(number, elements, bool(same_size), dtype, op, group, where, first)


class Aside(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank does beside training: fields as `Status` has them."""

    at: Seen | None = None
    waits_s: float | None = None
    members: tuple[int, ...] = ()
    excuse: str = ""
    excuse_s: float = 0.0


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank does."""

    rank: int
    host: str
    pid: int
    born: int
    """When its process began: process numbers are used again."""
    beat: int = 0
    """Grows while its alarm lives."""
    state: State = "runs"
    note: str = ""
    """What it raised."""
    at: Seen | None = None
    """What it is in; where it waits in nothing, what it issued last."""
    waits_s: float | None = None
    """For how long it has waited in that."""
    members: tuple[int, ...] = ()
    """The ranks of that group."""
    lately: tuple[Seen, ...] = ()
    """The few that it issued last: it may have come through one that another died in."""
    counts: dict[str, int] = {}
    """How many collectives it issued, by group."""
    doing: str = ""
    """The line its main thread is at."""
    excuse: str = ""
    """What it announced that takes long."""
    excuse_s: float = 0.0
    """For how much longer that may take."""
    aside: Aside | None = None
    """What it does beside training."""


def beside(status: Status) -> Status:
    """Return a status as if what goes on beside training were all."""
    aside = status.aside or Aside()
    return msgspec.structs.replace(
        status,
        at=aside.at,
        waits_s=aside.waits_s,
        members=aside.members,
        lately=(),
        excuse=aside.excuse,
        excuse_s=aside.excuse_s,
    )


def describe(status: Status) -> str:
    """Say in a line what a rank does."""
    if status.state == "raised":
        said = f"raised {status.note}"
    elif status.state == "left":
        said = "has left: its program is over"
    elif status.waits_s is not None or status.state == "lost":
        waited = "" if status.waits_s is None else f" for {status.waits_s:.1f} s"
        broken = status.aside.at if status.at is None and status.aside is not None else status.at
        return f"rank {status.rank} waits{waited} in {broken}"
    else:
        said = f"is at {status.doing or 'no known line'}, in no collective"
        if status.excuse:
            said += f" ({status.excuse})"
    last = f"; its last was {status.at}" if status.at is not None else "; it has been in none"
    return f"rank {status.rank} {said}{last}"
