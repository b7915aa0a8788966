"""`RankHealth`: what a rank reports of itself; `CollectiveRecord`: a flight-recorder entry."""

from typing import Literal, Self

import msgspec

from meshwright.run.parallel.flight_recorder import FlightRecord

RankLifecycle = Literal["running", "raised", "lost", "exited"]
"""`lost` is a rank whose way to another broke, `exited` one that has done its work."""


class CollectiveRecord(msgspec.Struct, frozen=True):
    """An entry of a journal, as another process reads it."""

    sequence_number: int
    elements: int
    same_size: bool
    dtype: str
    op: str
    group: str
    call_site: str
    first_rank: int = 0
    """The first rank of its group."""

    def __str__(self) -> str:
        what = (
            f"{self.op} number {self.sequence_number} of group {self.group}, {self.elements:,} "
            f"elements"
        )
        return (
            f"{what} of {self.dtype.removeprefix('torch.')}, at {self.call_site or 'no known line'}"
        )

    @property
    def signature(self) -> tuple[str, str, int]:
        """What must be the same on all members."""
        return self.op, self.dtype, self.elements if self.same_size else 0

    @classmethod
    def from_record(cls, entry: FlightRecord) -> Self:
        """Return an entry in words."""
        return cls(
            entry.sequence_number,
            entry.elements,
            entry.same_size,
            str(entry.dtype),
            entry.op,
            entry.group,
            "" if entry.call_site is None else str(entry.call_site),
            entry.first_rank,
        )

    @classmethod
    def parse_shared_page(cls, board: bytes) -> Self | None:
        """Return what stands on a board; None where nothing does, or only a part of it."""
        words = board.rstrip(b"\0").decode(errors="replace").split("\t")
        if len(words) < 7 or not all(word.isdigit() for word in words[:4]):
            return None
        number, elements, same_size, first = (int(word) for word in words[:4])
        dtype, op, group, *place = words[4:]
        where = f"{place[0]}:{place[1]} ({place[2]})" if len(place) == 3 else ""
        return cls(number, elements, bool(same_size), dtype, op, group, where, first)


class BackgroundStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank does beside training: fields as `RankHealth` has them."""

    current_collective: CollectiveRecord | None = None
    wait_s: float | None = None
    group_ranks: tuple[int, ...] = ()
    expected_delay: str = ""
    expected_delay_s: float = 0.0


class RankHealth(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank does."""

    rank: int
    host: str
    pid: int
    process_start: int
    """When its process began: process numbers are used again."""
    heartbeat: int = 0
    """Grows while its alarm lives."""
    state: RankLifecycle = "running"
    error: str = ""
    """What it raised."""
    current_collective: CollectiveRecord | None = None
    """What it is in; where it waits in nothing, what it issued last."""
    wait_s: float | None = None
    """For how long it has waited in that."""
    group_ranks: tuple[int, ...] = ()
    """The ranks of that group."""
    recent_collectives: tuple[CollectiveRecord, ...] = ()
    """The few that it issued last: it may have come through one that another died in."""
    collective_counts: dict[str, int] = {}
    """How many collectives it issued, by group."""
    current_line: str = ""
    """The line its main thread is at."""
    expected_delay: str = ""
    """What it announced that takes long."""
    expected_delay_s: float = 0.0
    """For how much longer that may take."""
    background: BackgroundStatus | None = None
    """What it does beside training."""


def replace_with_background(status: RankHealth) -> RankHealth:
    """Return a status as if what goes on beside training were all."""
    aside = status.background or BackgroundStatus()
    return msgspec.structs.replace(
        status,
        current_collective=aside.current_collective,
        wait_s=aside.wait_s,
        group_ranks=aside.group_ranks,
        recent_collectives=(),
        expected_delay=aside.expected_delay,
        expected_delay_s=aside.expected_delay_s,
    )


def describe_rank_health(status: RankHealth) -> str:
    """Say in a line what a rank does."""
    if status.state == "raised":
        said = f"raised {status.error}"
    elif status.state == "exited":
        said = "has exited: its program is over"
    elif status.wait_s is not None or status.state == "lost":
        waited = "" if status.wait_s is None else f" for {status.wait_s:.1f} s"
        broken = (
            status.background.current_collective
            if status.current_collective is None and status.background is not None
            else status.current_collective
        )
        return f"rank {status.rank} waits{waited} in {broken}"
    else:
        said = f"is at {status.current_line or 'no known line'}, in no collective"
        if status.expected_delay:
            said += f" ({status.expected_delay})"
    last = (
        f"; its last was {status.current_collective}"
        if status.current_collective is not None
        else "; it has been in none"
    )
    return f"rank {status.rank} {said}{last}"
