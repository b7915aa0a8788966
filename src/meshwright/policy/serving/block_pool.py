"""`HostBlockPool`: blocks of host memory for keys and values of those who made room."""

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from hashlib import blake2b

from meshwright.errors import InputError, Problem

HASH_BYTES = 16
"""Of a block's name. Two of 10¹² blocks have the same one by chance once in 10¹⁴ times."""


class BlockChain:
    """Blocks that follow each other in every sequence which holds any of them."""

    __slots__ = ("block_hashes", "blocks", "ref_count")

    def __init__(self, blocks: list[int], block_hashes: Sequence[Hashable], ref_count: int) -> None:
        self.blocks, self.ref_count = blocks, ref_count
        self.block_hashes = block_hashes
        """Their names; none where they have none."""


class BlockPool:
    """Blocks numbered from 0."""

    __slots__ = (
        "_idle",
        "_left",
        "_named",
        "_never",
        "_runs",
        "free_block_count",
        "reserved_block_count",
        "size",
    )

    def __init__(self, size: int) -> None:
        self.size = self.free_block_count = size
        """Blocks there are, and those of them that can still be promised."""
        # The last that came back is drawn first, then those that never were, by their numbers:
        # these stand nowhere, as a pool may have millions of blocks and a simulation draws none.
        self._left: list[int] = []
        self._never = size
        self._runs: dict[int, BlockChain] = {}
        """All that are not free, by their first blocks."""
        self._named: dict[Hashable, BlockChain] = {}
        """Those that can be found, by their first keys."""
        # A plain dictionary looks ever longer for its first key, the more were taken from there.
        self._idle: OrderedDict[BlockChain, None] = OrderedDict()
        self.reserved_block_count = 0
        """Blocks that were promised and not drawn yet."""
        """Named blocks that were used for something else."""

    @property
    def used_block_count(self) -> int:
        """Blocks that sequences hold or are promised."""
        return self.size - self.free_block_count

    def reserve(self, count: int) -> None:
        """Keep blocks for somebody; the caller has looked whether there are as many to `spare`."""
        self.reserved_block_count = promised = self.reserved_block_count + count
        self.free_block_count = spare = self.free_block_count - count
        assert spare >= 0, "more blocks are promised than there are"
        # Now, not when they are drawn: what is found later must not depend on who draws.
        free = len(self._left) + self._never
        if promised > free:
            self._evict(promised - free)

    def unreserve(self, count: int) -> None:
        """Take a promise back."""
        assert count <= self.reserved_block_count, "more promises are taken back than were given"
        self.reserved_block_count -= count
        self.free_block_count += count

    def allocate(self, count: int) -> list[int]:
        """Return promised blocks, each held once."""
        assert count <= self.reserved_block_count, "blocks are drawn that were not promised"
        self.reserved_block_count -= count
        left, next_new = self._left, self.size - self._never
        again = min(count, len(left))
        drawn = left[len(left) - again :]
        del left[len(left) - again :]
        drawn.reverse()
        drawn += range(next_new, next_new + count - again)
        self._never -= count - again
        if drawn:
            self._runs[drawn[0]] = BlockChain(drawn, (), 1)
        return drawn.copy()

    def find_cached_blocks(self, keys: Sequence[Hashable], stop: int | None = None) -> list[int]:
        """Return the blocks of a beginning, as far as it is here, and as `stop` keys go."""
        found: list[int] = []
        at, stop = 0, len(keys) if stop is None else min(stop, len(keys))
        while at < stop and (run := self._named.get(keys[at])) is not None:
            count = _alike(run.block_hashes, keys, at, stop)
            found += run.blocks[:count]
            at += count
        return found

    def count_evictable(self, blocks: Sequence[int]) -> int:
        """Count the blocks that nobody holds: holding them takes from what there is to spare."""
        at = idle = 0
        while at < len(blocks):
            run = self._runs[blocks[at]]
            count = _alike(run.blocks, blocks, at, len(blocks))
            at += count
            if not run.ref_count:
                idle += count
        return idle

    def touch(self, blocks: Sequence[int]) -> None:
        """Hold blocks once more, from the beginning of a sequence or of what was found."""
        for run in self._parts(blocks, 0, len(blocks)):
            if not run.ref_count:
                # What was cut off a run is no longer among idle ones.
                self._idle.pop(run, None)
                self.free_block_count -= len(run.blocks)
            run.ref_count += 1

    def cache_full_blocks(
        self, blocks: Sequence[int], keys: Sequence[Hashable], first: int, stop: int
    ) -> None:
        """Let a sequence's full blocks be found by what is in them, those from `first` to `stop`.

        Of two that are alike, the one that was first is found.
        """
        at, named = 0, self._named
        while at < first:
            # A run of another may go on where the sequence's own blocks are still without names.
            run = named.get(keys[at])
            at += 1 if run is None else _alike(run.block_hashes, keys, at, stop)
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
                at = new = at + _alike(run.block_hashes, keys, at, stop)
        self._name(blocks, keys, start, new, stop)

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks."""
        # A beginning is of more use than what follows it, so its end is used again first.
        for run in reversed(self._parts(blocks, 0, len(blocks))):
            run.ref_count -= 1
            if not run.ref_count:
                self.free_block_count += len(run.blocks)
                if run.block_hashes:
                    self._idle[run] = None
                else:
                    self._give_back(run)

    def reset_prefix_cache(self) -> None:
        """Name nothing any more: the weights that made these keys and values have changed."""
        for run in self._idle:
            self._give_back(run)
        for run in self._named.values():
            run.block_hashes = ()
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
            if not run.block_hashes:
                run.block_hashes = keys[at:end]
                self._named[keys[at]] = run
            at = end

    def _parts(self, blocks: Sequence[int], first: int, stop: int) -> list[BlockChain]:
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

    def _cut(self, run: BlockChain, count: int) -> BlockChain:
        """Take the first blocks of a run out of it: the rest stays where it is among idle ones."""
        begin = BlockChain(run.blocks[:count], run.block_hashes[:count], run.ref_count)
        run.blocks, run.block_hashes = run.blocks[count:], run.block_hashes[count:]
        self._runs[begin.blocks[0]], self._runs[run.blocks[0]] = begin, run
        if begin.block_hashes:
            self._named[begin.block_hashes[0]], self._named[run.block_hashes[0]] = begin, run
        return begin

    def _give_back(self, run: BlockChain) -> None:
        del self._runs[run.blocks[0]]
        self._left += run.blocks[::-1]

    def _evict(self, count: int) -> None:
        while count:
            run = next(iter(self._idle))
            if len(run.blocks) > count:
                self._left += run.blocks[: -count - 1 : -1]
                run.blocks, run.block_hashes = run.blocks[:-count], run.block_hashes[:-count]
                return
            count -= len(run.blocks)
            del self._idle[run], self._named[run.block_hashes[0]]
            self._give_back(run)


def _alike(run: Sequence[Hashable], those: Sequence[Hashable], first: int, stop: int) -> int:
    """Count how many of `those` from `first` to `stop` are a run's, which begins as they do.

    A key tells all before it, and a block lies in one run: where two are the same, all before are.
    """
    count = min(len(run), stop - first)
    if run[count - 1] == those[first + count - 1]:
        return count
    return bisect_left(range(count), True, key=lambda at: run[at] != those[first + at])


def compute_cache_salt(version: int, adapter: str | None) -> bytes:
    """Return what sets apart keys and values that other weights made.

    `version` counts the weights that an engine has been given since it began with those of 0.
    """
    if not version and adapter is None:
        return b""
    return blake2b(repr((version, adapter)).encode()).digest()


def hash_blocks(
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
        last = blake2b(text[start : start + width], digest_size=HASH_BYTES, key=last).digest()
        names.append(last)
    return names


class HostBlockPool(BlockPool):
    """A pool whose blocks are given back when the step that reads them has been decided.

    A step moves out before it moves in: what is read within it must not be written over.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.pending_free: list[int] = []
        """Blocks that the present step reads."""

    def try_allocate(self, count: int) -> list[int]:
        """Return so many blocks; none where there are not as many."""
        if count > self.free_block_count:
            return []
        self.reserve(count)
        return self.allocate(count)

    def free_after_step(self, blocks: list[int]) -> None:
        """Give back blocks that the present step reads."""
        self.pending_free += blocks

    def begin_step(self) -> None:
        """Begin the next step."""
        if self.pending_free:
            self.free_blocks(self.pending_free)
            self.pending_free = []
