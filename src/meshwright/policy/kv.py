"""`BlockPool`: the blocks of a KV cache, who holds them and which of them can be shared.

A block is free, held by one or more sequences, or idle: held by nobody, but still named after the
tokens in it, so that a prompt that begins alike finds it. Idle blocks are used again, the one that
was let go first before all others, when no free ones are left.

Blocks can be promised before they are drawn. A sequence that grows needs the promise; which blocks
it gets matters only to those who read them, so that a simulation never draws any.
"""

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b

from meshwright.errors import InputError, Problem

KEY_BYTES = 16
"""Of a block's name. Two of 10¹² blocks have the same one by chance once in 10¹⁴ times."""


class BlockPool:
    """Blocks numbered from 0."""

    __slots__ = (
        "_holders", "_idle", "_keys", "_left", "_named", "evictions", "promised", "size", "spare",
    )  # fmt: skip

    def __init__(self, size: int) -> None:
        self.size = self.spare = size
        """Blocks there are, and those of them that can still be promised."""
        # The last is drawn first, and then those that never were, by their numbers: these stand
        # nowhere, as a pool may have millions of blocks and a simulation draws none.
        self._left: list[int] = []
        self._holders: list[int] = []
        """Of each block that ever was drawn."""
        self._keys: dict[int, Hashable] = {}
        self._named: dict[Hashable, int] = {}
        # A plain dictionary looks ever longer for its first key, the more were taken from there.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.promised = 0
        """Blocks that were promised and not drawn yet."""
        self.evictions = 0
        """Named blocks that were used for something else."""

    @property
    def held(self) -> int:
        """Blocks that sequences hold or are promised."""
        return self.size - self.spare

    def holders(self, block: int) -> int:
        """Count the sequences that hold a block."""
        return self._holders[block] if block < len(self._holders) else 0

    def promise(self, count: int) -> None:
        """Keep blocks for somebody; the caller has looked whether there are as many to `spare`."""
        assert count <= self.spare, "more blocks are promised than there are"
        self.promised += count
        self.spare -= count
        # Now, not when they are drawn: what is found later must not depend on who draws.
        free = len(self._left) + self.size - len(self._holders)
        if self.promised > free:
            self._evict(self.promised - free)

    def forgo(self, count: int) -> None:
        """Take a promise back."""
        assert count <= self.promised, "more promises are taken back than were given"
        self.promised -= count
        self.spare += count

    def draw(self, count: int) -> list[int]:
        """Return promised blocks, each held once."""
        assert count <= self.promised, "blocks are drawn that were not promised"
        self.promised -= count
        left, holders = self._left, self._holders
        again = min(count, len(left))
        drawn = left[len(left) - again :]
        del left[len(left) - again :]
        drawn.reverse()
        for block in drawn:
            holders[block] = 1
        drawn += range(len(holders), len(holders) + count - again)
        holders += [1] * (count - again)
        return drawn

    def find(self, keys: Iterable[Hashable]) -> list[int]:
        """Return the blocks of a beginning, as far as it is here."""
        found, named = [], self._named
        for key in keys:
            block = named.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def idle_among(self, blocks: Iterable[int]) -> int:
        """Count the blocks that nobody holds: holding them takes from what there is to spare."""
        holders = self._holders
        return sum(not holders[block] for block in blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold blocks once more."""
        for block in blocks:
            if not self._holders[block]:
                del self._idle[block]
                self.spare -= 1
            self._holders[block] += 1

    def name(self, block: int, key: Hashable) -> None:
        """Let a full block be found by what is in it; of two that are alike, the first is."""
        self.name_all((block,), (key,))

    def name_all(self, blocks: Iterable[int], keys: Iterable[Hashable]) -> None:
        """Do so with many."""
        named, known = self._named, self._keys
        for block, key in zip(blocks, keys, strict=True):
            if key not in named and block not in known:
                named[key] = block
                known[block] = key

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of a sequence's blocks."""
        holders, keys, left, idle = self._holders, self._keys, self._left, self._idle
        spare = 0
        # A beginning is of more use than what follows it, so its end is used again first.
        for block in reversed(blocks):
            others = holders[block] = holders[block] - 1
            if not others:
                spare += 1
                if block in keys:
                    idle[block] = None
                else:
                    left.append(block)
        self.spare += spare

    def forget(self) -> None:
        """Name nothing any more: the weights that made these keys and values have changed."""
        self._left += self._idle
        self._idle.clear()
        self._keys.clear()
        self._named.clear()

    def _evict(self, count: int) -> None:
        next_idle, named, keys = self._idle.popitem, self._named, self._keys
        for _ in range(count):
            block, _ = next_idle(last=False)
            del named[keys.pop(block)]
            self._left.append(block)
        self.evictions += count


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
