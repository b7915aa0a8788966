"""One collective of a team from its first to its last word: signed in, agreed upon, watched."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.collective.agreement import Call, agree
from meshwright.run.parallel.collective.ledger import (
    AWAITED,
    BLAMED,
    DONE,
    LAST,
    NOTHING,
    SEQUENCE,
    SIGNATURE,
    STATE,
    WHY,
    Spot,
    State,
    alive,
    set_text,
)
from meshwright.run.parallel.collective.stall import (
    WHYS,
    CollectiveStalled,
    Scene,
    absentee,
)
from meshwright.run.parallel.collective.team import Team

Spots = Callable[[int, int], Spot]


@contextmanager
def turn(team: Team, call: Call, signature: int, spots: Spots) -> Iterator[None]:
    """Take part in the team's next collective; inside, the rank moves its data.

    An error inside leaves the team unable to go on: frames of it may be anywhere.
    """
    if team.broken:
        fix = "make a new process group and a new Team"
        raise InputError([Problem("team", team.broken, fix)])
    row = team.ledger.mine
    team.sequence += 1
    if row[SIGNATURE] != signature:
        set_text(row, str(call))
    row[SIGNATURE], row[DONE], row[LAST] = signature, 0, NOTHING
    row[AWAITED], row[SEQUENCE], row[STATE] = NOTHING, team.sequence, State.INSIDE
    watch = team.thread or team.watch
    try:
        if signature not in team.agreed:
            _agree(team, call, spots)
            team.agreed.add(signature)
        watch.begin(spots)
        yield
    except BaseException as error:
        if isinstance(error, InputError):  # all ranks found out before anything moved
            row[STATE] = State.OUTSIDE
            raise
        if isinstance(error, CollectiveStalled):
            row[BLAMED], row[WHY] = error.stall.rank, WHYS.index(error.stall.why)
        row[STATE] = State.GAVE_UP
        team.ledger.publish(at_once=True)
        team.broken = f"it gave up in collective {team.sequence} ({call}): {error}"
        raise
    finally:
        watch.end()
    row[STATE] = State.OUTSIDE


def _agree(team: Team, call: Call, spots: Spots) -> None:
    """Compare this call with those of the others, and find out who does not come."""

    def scene() -> Scene:
        entries = team.ledger.read()
        dead = frozenset(
            rank for rank, entry in enumerate(entries) if team.ledger.one_host and not alive(entry)
        )
        return Scene(team.rank, entries, dead, frozenset(), spots, team.patience_s)

    def look(missing: set[int]) -> None:
        now = scene()
        lost = {
            rank for rank in missing if rank in now.dead or now.entries[rank].state is State.GAVE_UP
        }
        if lost:
            raise CollectiveStalled(absentee(now, lost), team.rank)

    missing = agree(
        team.store,
        team.rank,
        team.ranks,
        call,
        sequence=team.sequence,
        before=team.agreed_at,
        patience_s=team.patience_s,
        look=look,
    )
    if missing:
        raise CollectiveStalled(absentee(scene(), missing), team.rank)
    team.agreed_at = team.sequence
