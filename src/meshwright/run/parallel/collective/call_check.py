"""`check_calls_match`: check once per kind of call that all ranks issue the same collective."""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import Collective
from meshwright.run.parallel.collective.communicator import RankCommunicator
from meshwright.run.parallel.collective.progress_table import (
    BLAMED_RANK,
    DONE,
    LAST,
    NO_VALUE,
    SEQUENCE,
    SIGNATURE,
    STALL_CAUSE,
    STATE,
    WAITING_FOR,
    PlanPosition,
    ProgressState,
    is_alive,
    set_collective_name,
)
from meshwright.run.parallel.collective.stall_diagnosis import (
    STALL_CAUSES,
    CollectiveStallError,
    StallSnapshot,
    diagnose_missing_rank,
)


class CollectiveSignature(NamedTuple):
    """What a rank is about to do, as far as all ranks must be of one mind."""

    digest: str
    """The algorithm."""
    collective_name: str
    dtype: str
    elements: int
    """Of the message; of one chunk, for all_to_all_v."""
    reduce: str
    frame: int
    transport: str

    @property
    def signature(self) -> int:
        """The call as a number."""
        raw = hashlib.blake2b(msgspec.json.encode(self), digest_size=8).digest()
        return int.from_bytes(raw, "big") >> 1

    def __str__(self) -> str:
        return f"{self.collective_name} of {self.elements:,} {self.dtype}"


def hash_collective(collective: Collective) -> str:
    """Return a short mark of everything that a collective does."""
    mark = hashlib.blake2b(digest_size=8)
    plain = (
        collective.op,
        collective.ranks,
        collective.chunks,
        collective.slots,
        collective.root,
        collective.switches,
        collective.counts,
        collective.peers,
    )
    mark.update(repr(plain).encode())
    for sweep in collective.sweeps:
        mark.update(repr((sweep.span, sweep.shift)).encode())
        mark.update(sweep.moves.table.tobytes())
    return mark.hexdigest()


def check_calls_match(
    store: Store,
    rank: int,
    ranks: int,
    call: CollectiveSignature,
    *,
    sequence: int,
    before: int,
    timeout_s: float,
    look: Callable[[set[int]], None],
) -> set[int]:
    """Compare the calls of all ranks; raises `InputError` that names those who differ.

    Returns the ranks that have said nothing when patience is over. `look` is called from time to
    time with those that are still missing; it may raise. `before` is the last collective that was
    agreed upon.
    """
    store.set(_key(sequence, rank), msgspec.json.encode(call).decode())
    missing, calls, until = (
        set(range(ranks)),
        dict[int, CollectiveSignature](),
        time.monotonic() + timeout_s,
    )
    while missing:
        for other in sorted(missing):
            key = _key(sequence, other)
            if store.check([key]):
                calls[other] = msgspec.json.decode(store.get(key), type=CollectiveSignature)
                missing.discard(other)
        if missing:
            look(missing)
            if time.monotonic() > until:
                return missing
            _wait(store, _key(sequence, min(missing)))
    if before:
        # Everybody is here, so nobody reads any more what was said then.
        store.delete_key(_key(before, rank))
    if len(set(calls.values())) > 1:
        raise InputError(_differences(calls))
    return set()


def _wait(store: Store, key: str) -> None:
    try:
        store.wait([key], timedelta(milliseconds=100))
    except dist.DistStoreError:
        return


def _differences(calls: dict[int, CollectiveSignature]) -> list[Problem]:
    """Say of each group of ranks what it calls, the smaller groups first."""
    groups: dict[CollectiveSignature, list[int]] = {}
    for rank in sorted(calls):
        groups.setdefault(calls[rank], []).append(rank)
    ordered = sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))
    usual, usual_ranks = ordered[-1]
    problems = []
    for call, ranks in ordered[:-1]:
        differs = [
            f"{name} {getattr(call, name)} and not {getattr(usual, name)}"
            for name in CollectiveSignature._fields
            if getattr(call, name) != getattr(usual, name) and name != "collective_name"
        ]
        who = f"{'rank' if len(ranks) == 1 else 'ranks'} {_list(ranks)}"
        what = f"calls {call}, but {_list(usual_ranks)} {usual}: {', '.join(differs)}"
        problems.append(Problem(who, what, "call the same collective with equal sizes everywhere"))
    return problems


def _list(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _key(sequence: int, rank: int) -> str:
    return f"call/{sequence}/{rank}"


PositionLookup = Callable[[int, int], PlanPosition]


@contextmanager
def enter_collective(
    team: RankCommunicator, call: CollectiveSignature, signature: int, spots: PositionLookup
) -> Iterator[None]:
    """Take part in the team's next collective; inside, the rank moves its data.

    An error inside leaves the team unable to go on: frames of it may be anywhere.
    """
    if team.failure:
        fix = "make a new process group and a new RankCommunicator"
        raise InputError([Problem("team", team.failure, fix)])
    row = team.progress_table.own_row
    team.sequence += 1
    if row[SIGNATURE] != signature:
        set_collective_name(row, str(call))
    row[SIGNATURE], row[DONE], row[LAST] = signature, 0, NO_VALUE
    row[WAITING_FOR], row[SEQUENCE], row[STATE] = NO_VALUE, team.sequence, ProgressState.ENTERED
    watch = team.monitor_thread or team.stall_monitor
    try:
        if signature not in team.checked_signatures:
            _agree(team, call, spots)
            team.checked_signatures.add(signature)
        watch.start(spots)
        yield
    except BaseException as error:
        if isinstance(error, InputError):  # all ranks found out before anything moved
            row[STATE] = ProgressState.NOT_ENTERED
            raise
        if isinstance(error, CollectiveStallError):
            row[BLAMED_RANK], row[STALL_CAUSE] = (
                error.stall.blamed_rank,
                STALL_CAUSES.index(error.stall.cause),
            )
        row[STATE] = ProgressState.ABORTED
        team.progress_table.publish(at_once=True)
        team.failure = f"it gave up in collective {team.sequence} ({call}): {error}"
        raise
    finally:
        watch.stop()
    row[STATE] = ProgressState.NOT_ENTERED


def _agree(team: RankCommunicator, call: CollectiveSignature, spots: PositionLookup) -> None:
    """Compare this call with those of the others, and find out who does not come."""

    def scene() -> StallSnapshot:
        entries = team.progress_table.read()
        dead = frozenset(
            rank
            for rank, entry in enumerate(entries)
            if team.progress_table.is_single_host and not is_alive(entry)
        )
        return StallSnapshot(team.rank, entries, dead, frozenset(), spots, team.timeout_s)

    def look(missing: set[int]) -> None:
        now = scene()
        lost = {
            rank
            for rank in missing
            if rank in now.dead_ranks or now.entries[rank].state is ProgressState.ABORTED
        }
        if lost:
            raise CollectiveStallError(diagnose_missing_rank(now, lost), team.rank)

    missing = check_calls_match(
        team.store,
        team.rank,
        team.ranks,
        call,
        sequence=team.sequence,
        before=team.checked_at_sequence,
        timeout_s=team.timeout_s,
        look=look,
    )
    if missing:
        raise CollectiveStallError(diagnose_missing_rank(scene(), missing), team.rank)
    team.checked_at_sequence = team.sequence
