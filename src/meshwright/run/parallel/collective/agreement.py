"""`agree`: do all ranks of a team mean the same collective? Asked once for each kind of call."""

import hashlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import msgspec
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import Collective


class Call(NamedTuple):
    """What a rank is about to do, as far as all ranks must be of one mind."""

    digest: str
    """The algorithm."""
    title: str
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
        return f"{self.title} of {self.elements:,} {self.dtype}"


def digest(collective: Collective) -> str:
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


def agree(
    store: Store,
    rank: int,
    ranks: int,
    call: Call,
    *,
    sequence: int,
    before: int,
    patience_s: float,
    look: Callable[[set[int]], None],
) -> set[int]:
    """Compare the calls of all ranks; raises `InputError` that names those who differ.

    Returns the ranks that have said nothing when patience is over. `look` is called from time to
    time with those that are still missing; it may raise. `before` is the last collective that was
    agreed upon.
    """
    store.set(_key(sequence, rank), msgspec.json.encode(call).decode())
    missing, calls, until = set(range(ranks)), dict[int, Call](), time.monotonic() + patience_s
    while missing:
        for other in sorted(missing):
            key = _key(sequence, other)
            if store.check([key]):
                calls[other] = msgspec.json.decode(store.get(key), type=Call)
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


def _differences(calls: dict[int, Call]) -> list[Problem]:
    """Say of each group of ranks what it calls, the smaller groups first."""
    groups: dict[Call, list[int]] = {}
    for rank in sorted(calls):
        groups.setdefault(calls[rank], []).append(rank)
    ordered = sorted(groups.items(), key=lambda item: (len(item[1]), item[1]))
    usual, usual_ranks = ordered[-1]
    problems = []
    for call, ranks in ordered[:-1]:
        differs = [
            f"{name} {getattr(call, name)} and not {getattr(usual, name)}"
            for name in Call._fields
            if getattr(call, name) != getattr(usual, name) and name != "title"
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
