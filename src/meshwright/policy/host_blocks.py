"""`HostBlocks`: blocks of host memory for keys and values of those who made room."""

from meshwright.policy.kv import BlockPool


class HostBlocks(BlockPool):
    """A pool whose blocks are given back when the step that reads them has been decided.

    A step moves out before it moves in: what is read within it must not be written over.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.read: list[int] = []
        """Blocks that the present step reads."""

    def take(self, count: int) -> list[int]:
        """Return so many blocks; none where there are not as many."""
        if count > self.spare:
            return []
        self.promise(count)
        return self.draw(count)

    def leave(self, blocks: list[int]) -> None:
        """Give back blocks that the present step reads."""
        self.read += blocks

    def settle(self) -> None:
        """Begin the next step."""
        if self.read:
            self.release(self.read)
            self.read = []
