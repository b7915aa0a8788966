"""`agree`: ranks compare their jobs through a store, before any group forms.

Rank 0 reads what all have written and has the last word, which every rank reads: so all are refused
with the same message, or none is.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

from meshwright.errors import InputError, MeshwrightError, Problem

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_MOST_SHOWN = 5
_ANSWER_S = 30.0
"""How much longer than rank 0 the others wait: it writes its verdict when its own time is up."""
_HEARD_S = 10.0


class RanksMissing(MeshwrightError):
    """Some ranks did not come to the meeting."""


def agree(
    store: "Store", rank: int, size: int, job: Mapping[str, object], *, meet_s: float = 300.0
) -> None:
    """Refuse, on every rank and with one message, a job that is not the same on all of them.

    `job` has its values by their paths, such as those of `mw train --dry-run`.
    """
    values = json.dumps({key: str(value) for key, value in sorted(job.items())})
    digest = hashlib.sha256(f"{size} {values}".encode()).hexdigest()[:16]
    # The values of equal jobs are stored once.
    store.set(f"values/{digest}", json.dumps([size, values]))
    store.set(f"job/{rank}", digest)
    if rank == 0:
        store.set("verdict", _verdict(store, size, meet_s))
    verdict = _awaited(store, "verdict", meet_s + _ANSWER_S).decode()
    if verdict:
        _let_all_hear(store, rank, size)
    if verdict.startswith("missing:"):
        raise RanksMissing(verdict.removeprefix("missing:"))
    if verdict:
        raise InputError([Problem("job", verdict, "give every rank the same file and flags")])


def _awaited(store: "Store", key: str, wait_s: float) -> bytes:
    try:
        store.wait([key], timedelta(seconds=wait_s))
        return store.get(key)
    except RuntimeError as error:  # rank 0 is gone, or stuck
        detail = str(error).partition("\n")[0]
        raise RanksMissing(f"rank 0 did not answer at the start ({detail})") from None


def _let_all_hear(store: "Store", rank: int, size: int) -> None:
    """Keep rank 0, whose end is that of the store, until the others have read the verdict."""
    with suppress(RuntimeError):
        store.set(f"heard/{rank}", "")
        if rank == 0:
            keys = [f"heard/{each}" for each in range(size) if store.check([f"job/{each}"])]
            store.wait(keys, timedelta(seconds=_HEARD_S))


def _verdict(store: "Store", size: int, meet_s: float) -> str:
    keys = [f"job/{rank}" for rank in range(size)]
    try:
        store.wait(keys, timedelta(seconds=meet_s))
    except RuntimeError:
        absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
        return f"missing:{ranked(absent)} of {size} did not come within {meet_s:g} s"
    digests = [each.decode() for each in store.multi_get(keys)]
    if len(set(digests)) == 1:
        return ""
    mine, parts = _read(store, digests[0]), []
    for digest in dict.fromkeys(digests):
        if digest == digests[0]:
            continue
        theirs = [rank for rank, each in enumerate(digests) if each == digest]
        differing = _differences(mine, _read(store, digest))
        verb = "has" if len(theirs) == 1 else "have"
        parts.append(f"{ranked(theirs)} {verb} another job than rank 0: {differing}")
        if len(parts) == _MOST_SHOWN:
            break
    return "; ".join(parts)


def _read(store: "Store", digest: str) -> dict[str, str]:
    size, values = json.loads(store.get(f"values/{digest}").decode())
    return {"WORLD_SIZE": str(size), **json.loads(values)}


def _differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    shown = [
        f"{key} is {theirs.get(key, 'not set')} there and {mine.get(key, 'not set')} on rank 0"
        for key in keys[:_MOST_SHOWN]
    ]
    more = len(keys) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")


def ranked(ranks: Sequence[int]) -> str:
    """Name some ranks: `rank 3`, `ranks 1-4 and 7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    listed = ", ".join(texts[:-1]) + f" and {texts[-1]}" if len(texts) > 1 else "".join(texts)
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
