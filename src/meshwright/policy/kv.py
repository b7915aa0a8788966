"""`BlockPool`: the blocks of a KV cache, who holds them and which of them can be shared.

A block is free, held by one or more sequences, or idle: held by nobody, but still named after the
tokens in it, so that a prompt that begins alike finds it. Idle blocks are used again, the one that
was let go first before all others, when no free ones are left.

Blocks can be promised before they are drawn. A sequence that grows needs the promise; which blocks
it gets matters only to those who read them, so that a simulation never draws any.

Prompts have hundreds of blocks, so these are kept in runs: blocks that follow each other, and that
whoever holds one of them holds all of. Whatever happens to a prompt costs as much as it has runs.
"""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from hashlib import blake2b

from meshwright.errors import InputError, Problem

KEY_BYTES = 16
"""Of a block's name. Two of 10¹² blocks have the same one by chance once in 10¹⁴ times."""


class Run:
    """Blocks that follow each other in every sequence which holds any of them."""

    __slots__ = ("blocks", "holders", "keys")

    def __init__(self, blocks: list[int], keys: Sequence[Hashable], holders: int) -> None:
        self.blocks, self.holders = blocks, holders
        self.keys = keys
        """Their names; none where they have none."""


class BlockPool:
    """Blocks numbered from 0."""

    __slots__ = ("_idle", "_left", "_named", "_never", "_runs", "promised", "size", "spare")

    def __init__(self, size: int) -> None:
        self.size = self.spare = size
        """Blocks there are, and those of them that can still be promised."""
        # The last that came back is drawn first, then those that never were, by their numbers:
        # these stand nowhere, as a pool may have millions of blocks and a simulation draws none.
        self._left: list[int] = []
        self._never = size
        self._runs: dict[int, Run] = {}
        """All that are not free, by their first blocks."""
        self._named: dict[Hashable, Run] = {}
        """Those that can be found, by their first keys."""
        # A plain dictionary looks ever longer for its first key, the more were taken from there.
        self._idle: OrderedDict[Run, None] = OrderedDict()
        self.promised = 0
        """Blocks that were promised and not drawn yet."""
        """Named blocks that were used for something else."""

    @property
    def held(self) -> int:
        """Blocks that sequences hold or are promised."""
        return self.size - self.spare

    def promise(self, count: int) -> None:
        """Keep blocks for somebody; the caller has looked whether there are as many to `spare`."""
        self.promised = promised = self.promised + count
        self.spare = spare = self.spare - count
        assert spare >= 0, "more blocks are promised than there are"
        # Now, not when they are drawn: what is found later must not depend on who draws.
        free = len(self._left) + self._never
        if promised > free:
            self._evict(promised - free)

    def forgo(self, count: int) -> None:
        """Take a promise back."""
        assert count <= self.promised, "more promises are taken back than were given"
        self.promised -= count
        self.spare += count

    def draw(self, count: int) -> list[int]:
        """Return promised blocks, each held once."""
        assert count <= self.promised, "blocks are drawn that were not promised"
        self.promised -= count
        left, next_new = self._left, self.size - self._never
        again = min(count, len(left))
        drawn = left[len(left) - again :]
        del left[len(left) - again :]
        drawn.reverse()
        drawn += range(next_new, next_new + count - again)
        self._never -= count - again
        if drawn:
            self._runs[drawn[0]] = Run(drawn, (), 1)
        return drawn.copy()

    def find(self, keys: Sequence[Hashable], stop: int | None = None) -> list[int]:
        """Return the blocks of a beginning, as far as it is here, and as `stop` keys go."""
        found: list[int] = []
        at, stop = 0, len(keys) if stop is None else min(stop, len(keys))
        while at < stop and (run := self._named.get(keys[at])) is not None:
            count = _alike(run.keys, keys, at, stop)
            found += run.blocks[:count]
            at += count
        return found

    def idle_among(self, blocks: Sequence[int]) -> int:
        """Count the blocks that nobody holds: holding them takes from what there is to spare."""
        at = idle = 0
        while at < len(blocks):
            run = self._runs[blocks[at]]
            count = _alike(run.blocks, blocks, at, len(blocks))
            at += count
            if not run.holders:
                idle += count
        return idle

    def hold(self, blocks: Sequence[int]) -> None:
        """Hold blocks once more, from the beginning of a sequence or of what was found."""
        for run in self._parts(blocks, 0, len(blocks)):
            if not run.holders:
                # What was cut off a run is no longer among idle ones.
                self._idle.pop(run, None)
                self.spare -= len(run.blocks)
            run.holders += 1

    def name(self, blocks: Sequence[int], keys: Sequence[Hashable], first: int, stop: int) -> None:
        """Let a sequence's full blocks be found by what is in them, those from `first` to `stop`.

        Of two that are alike, the one that was first is found.
        """
        at, named = 0, self._named
        while at < first:
            # A run of another may go on where the sequence's own blocks are still without names.
            run = named.get(keys[at])
            at += 1 if run is None else _alike(run.keys, keys, at, stop)
        new, start = at, first
        if named.keys().isdisjoint(keys[new:stop]):
            at = stop
        while at < stop:
            run = named.get(keys[at])
            if run is None:
                at += 1
            else:
                self._name(blocks, keys, start, new, at)
                start = at
                at = new = at + _alike(run.keys, keys, at, stop)
        self._name(blocks, keys, start, new, stop)

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks."""
        # A beginning is of more use than what follows it, so its end is used again first.
        for run in reversed(self._parts(blocks, 0, len(blocks))):
            run.holders -= 1
            if not run.holders:
                self.spare += len(run.blocks)
                if run.keys:
                    self._idle[run] = None
                else:
                    self._give_back(run)

    def forget(self) -> None:
        """Name nothing any more: the weights that made these keys and values have changed."""
        for run in self._idle:
            self._give_back(run)
        for run in self._named.values():
            run.keys = ()
        self._idle.clear()
        self._named.clear()

    def _name(
        self, blocks: Sequence[int], keys: Sequence[Hashable], first: int, new: int, stop: int
    ) -> None:
        """Name those of a sequence's blocks from `new` on that have no name, and cut at `first`."""
        self._parts(blocks, first, new)
        at = new
        for run in self._parts(blocks, new, stop):
            end = at + len(run.blocks)
            if not run.keys:
                run.keys = keys[at:end]
                self._named[keys[at]] = run
            at = end

    def _parts(self, blocks: Sequence[int], first: int, stop: int) -> list[Run]:
        """Return the runs of some blocks of a sequence, which are cut where it leaves them."""
        parts = []
        while first < stop:
            run = self._runs[blocks[first]]
            count = _alike(run.blocks, blocks, first, stop)
            if count < len(run.blocks):
                run = self._cut(run, count)
            parts.append(run)
            first += count
        return parts

    def _cut(self, run: Run, count: int) -> Run:
        """Take the first blocks of a run out of it: the rest stays where it is among idle ones."""
        begin = Run(run.blocks[:count], run.keys[:count], run.holders)
        run.blocks, run.keys = run.blocks[count:], run.keys[count:]
        self._runs[begin.blocks[0]], self._runs[run.blocks[0]] = begin, run
        if begin.keys:
            self._named[begin.keys[0]], self._named[run.keys[0]] = begin, run
        return begin

    def _give_back(self, run: Run) -> None:
        del self._runs[run.blocks[0]]
        self._left += run.blocks[::-1]

    def _evict(self, count: int) -> None:
        while count:
            run = next(iter(self._idle))
            if len(run.blocks) > count:
                self._left += run.blocks[: -count - 1 : -1]
                run.blocks, run.keys = run.blocks[:-count], run.keys[:-count]
                return
            count -= len(run.blocks)
            del self._idle[run], self._named[run.keys[0]]
            self._give_back(run)


def _alike(run: Sequence[Hashable], those: Sequence[Hashable], first: int, stop: int) -> int:
    """Count how many of `those` from `first` to `stop` are a run's, which begins as they do.

    A key tells all before it, and a block lies in one run: where two are the same, all before are.
    """
    count = min(len(run), stop - first)
    if run[count - 1] == those[first + count - 1]:
        return count
    return bisect_left(range(count), True, key=lambda at: run[at] != those[first + at])


def salt_of(version: int, adapter: str | None) -> bytes:
    """Return what sets apart keys and values that other weights made.

    `version` counts the weights that an engine has been given since it began with those of 0.
    """
    if not version and adapter is None:
        return b""
    return blake2b(repr((version, adapter)).encode()).digest()


def block_keys(
    tokens: Sequence[int], block_tokens: int, *, after: bytes = b"", salt: bytes = b""
) -> list[bytes]:
    """Return a name for each full block of tokens, which tells everything before it as well.

    `after` is the name of the block before the first; `salt` sets apart what must not be shared,
    such as keys and values that an adapter made.
    """
    if len(salt) > 64:
        raise InputError([Problem("salt", f"{len(salt)} bytes", "use 64 at most")])
    names, last = [], after or salt
    text = memoryview(array("q", tokens)).cast("B")
    width = 8 * block_tokens
    for start in range(0, len(text) - width + 1, width):
        last = blake2b(text[start : start + width], digest_size=KEY_BYTES, key=last).digest()
        names.append(last)
    return names
