"""`CollectiveOrderCheck`: checks once per step that all ranks issue the same collectives in order.

Every rank hands round, for each of its groups, how many it issued and a checksum of them: one
all-gather of a kilobyte over all ranks. Members of a group must have the same. Where they have not,
two of them show their journals, and every rank raises the same error, which names the first entry
at which these two parted. On a GPU the answer is read one step later, so that nobody waits for it.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.run.parallel.health.rank_health import CollectiveRecord
from meshwright.run.parallel.mesh import Mesh

MAX_GROUPS = 64
"""Groups and pairs of a rank that are compared; more than any layout needs, the rest is not."""
_SHOWN_S = 10.0
"""How long a rank may take to show its journal."""
_WORDS = 4


class CollectiveOrderError(MeshwrightError):
    """Ranks of a group issued different collectives."""


class _Row(NamedTuple):
    """What a rank says of one group."""

    key: int
    """Of the group's name and ranks."""
    size: int
    issued: int
    digest: int


class CollectiveOrderCheck:
    """Compares the journals of all ranks; every rank calls it at the same points."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._asked: tuple[Tensor, torch.cuda.Event] | None = None
        self._keys: dict[str, int] = {}

    def __call__(self) -> None:
        """Compare; raises `CollectiveOrderError` on every rank where a group's members differ."""
        mesh = self._mesh
        if mesh.world.size == 1:
            return
        gathered = mesh.world.all_gather(self._mine())
        if gathered.is_cuda:
            before, self._asked = self._asked, _fetched(gathered)
            if before is None:
                return
            # A step ago: all that is waited for is what the device had to do until then.
            before[1].synchronize()
            gathered = before[0]
        table = gathered.view(-1, MAX_GROUPS, _WORDS).numpy()
        if not is_order_consistent(table):
            self._refuse(table.tolist())

    def _mine(self) -> Tensor:
        journal, keys = self._mesh.flight_recorder, self._keys
        rows = [(0, 0, 0, 0)] * MAX_GROUPS
        for place, (name, members) in enumerate(list(journal.group_ranks.items())[:MAX_GROUPS]):
            key = keys.get(name)
            if key is None:
                key = keys[name] = _key(name, members)
            rows[place] = (key, len(members), journal.counts[name], journal.checksums[name])
        device = self._mesh.device
        # From pinned memory the copy waits for nothing; torch keeps that until the copy is done.
        pinned = device.type == "cuda"
        there = torch.tensor(rows, dtype=torch.int64, pin_memory=pinned).view(-1)
        return there.to(device, non_blocking=pinned)

    def _refuse(self, table: list[list[list[int]]]) -> None:
        for key, one, other in find_inconsistent_groups(table):
            raise CollectiveOrderError(self._parting(key, one, other))

    def _parting(self, key: int, one: int, other: int) -> str:
        """Say where two ranks parted; they show their journals, and everybody reads them."""
        mesh = self._mesh
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no other way
        mine = [CollectiveRecord.from_record(each) for each in mesh.flight_recorder.records]
        name = next((name for name, each in self._keys.items() if each == key), "")
        if mesh.rank in (one, other):
            shown = _Shown(name, [each for each in mine if each.group == name])
            store.set(f"meshwright/order/{mesh.rank}", msgspec.json.encode(shown).decode())
        keys = [f"meshwright/order/{rank}" for rank in (one, other)]
        try:
            store.wait(keys, timedelta(seconds=_SHOWN_S))
        except dist.DistStoreError:
            return f"ranks {one} and {other} issued different collectives; one does not say which"
        pair = [msgspec.json.decode(store.get(each), type=_Shown) for each in keys]
        return describe_divergence(
            one, pair[0].entries, other, pair[1].entries, pair[0].group or pair[1].group
        )


class _Shown(msgspec.Struct, frozen=True):
    group: str
    entries: list[CollectiveRecord]


def _fetched(gathered: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Begin to bring a tensor to the host; it is there when the event has come."""
    there = torch.empty(gathered.shape, dtype=gathered.dtype, pin_memory=True)
    there.copy_(gathered, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return there, event


def is_order_consistent(table: NDArray[np.int64]) -> bool:
    """Whether nothing differs: all members of a group are there, and say the same."""
    rows = table.reshape(-1, _WORDS)
    rows = rows[rows[:, 1] > 0]
    rows = rows[rows[:, 0].argsort()]
    same = rows[1:, 0] == rows[:-1, 0]
    if (rows[1:][same] != rows[:-1][same]).any():
        return False
    # A rank with more groups than places leaves some out.
    if (table[:, -1, 1] > 0).any():
        return True
    first = np.flatnonzero(np.concatenate(([True], ~same)))
    return bool((np.diff(first, append=len(rows)) == rows[first, 1]).all())


def find_inconsistent_groups(
    table: Sequence[Sequence[Sequence[int]]],
) -> Iterator[tuple[int, int, int]]:
    """Yield the groups, by key, of which two ranks say different things; and these ranks.

    A member that says nothing of a group has never used it: that is one too.
    """
    said: dict[int, dict[int, _Row]] = defaultdict(dict)
    for rank, rows in enumerate(table):
        for row in rows:
            if row[1]:
                said[row[0]][rank] = _Row(*row)
    for key, rows_of in said.items():
        first = min(rows_of)
        wrong = [rank for rank, row in rows_of.items() if row != rows_of[first]]
        if wrong:
            yield key, first, wrong[0]
        elif len(rows_of) < rows_of[first].size and rows_of[first].issued:
            yield key, first, first


def describe_divergence(
    one: int,
    ones: Sequence[CollectiveRecord],
    other: int,
    others: Sequence[CollectiveRecord],
    group: str,
) -> str:
    """Say at which entry of a group two ranks parted."""
    head = f"ranks {one} and {other} of group {group} issued different collectives"
    if one == other:
        last = f": {ones[-1]}" if ones else ""
        return f"rank {one} has used {group}, but its partner never did{last}"
    theirs = {each.sequence_number: each for each in others}
    mine = {each.sequence_number: each for each in ones}
    for number in sorted(mine.keys() | theirs.keys()):
        left, right = mine.get(number), theirs.get(number)
        if left is not None and right is not None and left.signature == right.signature:
            continue
        if number < min(max(mine, default=0), max(theirs, default=0)) and not (left and right):
            continue  # one of them keeps more entries
        said = [
            f"rank {rank} {'has issued no such one' if each is None else each}"
            for rank, each in ((one, left), (other, right))
        ]
        return f"{head}; they part at number {number}: {'; '.join(said)}"
    return f"{head}; where they parted is no longer in their journals"


def _key(name: str, members: tuple[int, ...]) -> int:
    """Return a number that stands for a group, the same on its members."""
    raw = hashlib.blake2b(f"{name}:{members}".encode(), digest_size=8).digest()
    return int.from_bytes(raw, "big") >> 1
