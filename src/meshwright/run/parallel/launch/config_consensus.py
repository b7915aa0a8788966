"""`check_config_consensus`: ranks compare their jobs through a store, before any group forms.

Each writes down its job and what is wrong with it. Rank 0 reads what all have written and has the
last word, which every rank reads: so all are refused with the same message, or none is.
"""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.spec.units import format_ranks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_MOST_SHOWN = 5
_ANSWER_S = 30.0
"""How much longer than rank 0 the others wait: it writes its verdict when its own time is up."""
_HEARD_S = 10.0
REJECT_WAIT_S = 5.0
"""How long ranks wait for the others once one of them cannot run."""
_POLL_S, _MOST_POLL_S = 0.02, 0.5


class MissingRanksError(MeshwrightError):
    """Some ranks did not reach the start of the job in time."""


def check_config_consensus(
    store: "Store",
    rank: int,
    size: int,
    job: Mapping[str, object] | None,
    *,
    problems: Sequence[Problem] = (),
    rendezvous_timeout_s: float = 300.0,
) -> None:
    """Refuse, on every rank and with one message, a job that is not the same on all or cannot run.

    `job` has its values by their paths, such as those of `mw train --dry-run`; None is one that
    cannot be read. `problems` is what this rank has found wrong with it. Where any has, nobody
    waits long for the missing.
    """
    values = {"WORLD_SIZE": str(size)}
    values |= {key: str(value) for key, value in sorted((job or {}).items())}
    told = json.dumps([None if job is None and problems else values, problems])
    digest = hashlib.sha256(told.encode()).hexdigest()[:16]
    if store.add(f"came/{rank}", 1) > 1:
        raise InputError([_crowded(rank)])
    # What equal jobs have to tell is stored once.
    store.set(f"values/{digest}", told)
    store.set(f"job/{rank}", digest)
    if problems:
        store.set("refused", "")
    if rank == 0:
        found = _verdict(store, size, rendezvous_timeout_s)
        store.set("verdict", json.dumps([digest, found.missing, found.problems]))
    try:
        wait_s = min(rendezvous_timeout_s, REJECT_WAIT_S) if problems else rendezvous_timeout_s
        verdict = _awaited(store, "verdict", wait_s + _ANSWER_S)
    except MissingRanksError:
        if problems:
            raise InputError(problems) from None
        raise
    heard, missing, refused = json.loads(verdict)
    if missing or refused:
        _let_all_hear(store, rank, size)
    if missing:
        raise MissingRanksError(missing)
    if refused:
        raise InputError([Problem(*each) for each in refused])
    if heard != digest:  # the verdict of a job that did not wait for this rank
        raise InputError([_crowded(rank)])


def _crowded(rank: int) -> Problem:
    what = f"there is another rank {rank} where these meet, of another job or of this one"
    fix = "use another MASTER_PORT, the same for all ranks, and let the launcher number them"
    return Problem("RANK", what, fix)


def _awaited(store: "Store", key: str, wait_s: float) -> bytes:
    try:
        store.wait([key], timedelta(seconds=wait_s))
        return store.get(key)
    except RuntimeError as error:  # rank 0 is gone, or stuck
        detail = str(error).partition("\n")[0]
        raise MissingRanksError(f"rank 0 did not answer at the start ({detail})") from None


def _let_all_hear(store: "Store", rank: int, size: int) -> None:
    """Keep rank 0, whose end is that of the store, until the others have read the verdict."""
    with suppress(RuntimeError):
        store.set(f"heard/{rank}", "")
        if rank == 0:
            keys = [f"heard/{each}" for each in range(size) if store.check([f"job/{each}"])]
            store.wait(keys, timedelta(seconds=_HEARD_S))


class _Verdict(NamedTuple):
    """What rank 0 tells all; nothing where the job can begin."""

    missing: str = ""
    problems: tuple[Problem, ...] = ()


def _verdict(store: "Store", size: int, rendezvous_timeout_s: float) -> _Verdict:
    came = _who_came(store, size, rendezvous_timeout_s)
    found = store.multi_get([f"job/{rank}" for rank in came])
    digests = {rank: digest.decode() for rank, digest in zip(came, found, strict=True)}
    told = {digest: _read(store, digest) for digest in dict.fromkeys(digests.values())}
    wrong = tuple(_own_problems(digests, told))
    if len(came) < size and not wrong:
        absent = [rank for rank in range(size) if rank not in digests]
        return _Verdict(
            f"{name_ranks(absent)} of {size} did not join within {rendezvous_timeout_s:g} s"
        )
    other = "; ".join(islice(_other_jobs(digests, told), _MOST_SHOWN))
    if other:
        wrong = (Problem("job", other, "give every rank the same file and flags"), *wrong)
    return _Verdict("", wrong)


def _who_came(store: "Store", size: int, rendezvous_timeout_s: float) -> list[int]:
    """Wait for all ranks, or some seconds more once one of them has something to say."""
    keys, pause_s = [f"job/{rank}" for rank in range(size)], _POLL_S
    until, refused = time.monotonic() + rendezvous_timeout_s, False
    while not store.check(keys) and time.monotonic() < until:
        if not refused and store.check(["refused"]):
            refused, until = True, min(until, time.monotonic() + REJECT_WAIT_S)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MOST_POLL_S)
    return [rank for rank, key in enumerate(keys) if store.check([key])]


class _Told(NamedTuple):
    """What a rank has told."""

    values: dict[str, str] | None
    """Its job; None where it could not read one."""
    problems: tuple[Problem, ...]


def _other_jobs(digests: Mapping[int, str], told: Mapping[str, _Told]) -> Iterator[str]:
    """Say which ranks have another job than the first, and how it differs."""
    ranks: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for rank, digest in digests.items():
        if (values := told[digest].values) is not None:
            ranks.setdefault(tuple(values.items()), []).append(rank)
    if not ranks:
        return
    (mine, (first, *_)), *others = ranks.items()
    for other, theirs in others:
        verb = "has" if len(theirs) == 1 else "have"
        differing = _differences(dict(mine), dict(other), first)
        yield f"{name_ranks(theirs)} {verb} another job than rank {first}: {differing}"


def _own_problems(digests: Mapping[int, str], told: Mapping[str, _Told]) -> Iterator[Problem]:
    """Give what ranks have found, once, and who did where it was neither all nor the first."""
    ranks: dict[Problem, list[int]] = {}
    for rank, digest in digests.items():
        for problem in told[digest].problems:
            ranks.setdefault(problem, []).append(rank)
    for problem, theirs in ranks.items():
        yield (
            problem
            if 0 in theirs
            else problem._replace(where=f"{name_ranks(theirs)}: {problem.where}")
        )


def _read(store: "Store", digest: str) -> _Told:
    values, problems = json.loads(store.get(f"values/{digest}").decode())
    return _Told(values, tuple(Problem(*each) for each in problems))


def _differences(mine: Mapping[str, str], theirs: Mapping[str, str], first: int) -> str:
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    shown = [
        f"{key} is {theirs.get(key, 'not set')} there and {mine.get(key, 'not set')} "
        f"on rank {first}"
        for key in keys[:_MOST_SHOWN]
    ]
    more = len(keys) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")


def name_ranks(ranks: Sequence[int]) -> str:
    """Name some ranks: `rank 3`, `ranks 1–4, 7`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)}"
