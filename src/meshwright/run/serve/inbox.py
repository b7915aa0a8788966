"""`Inbox`: the pieces of one ask, between the engine that makes them and the server.

It is used within one event loop. Whoever reads late gets all that is there at once, which is what
keeps a server from writing every token by itself when there are more than it can write.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from meshwright.run.serve.asked import Piece


class Inbox:
    """An iterator of pieces that ends when each choice has ended."""

    __slots__ = ("_closed", "_left", "_there", "_wanted")

    def __init__(self, choices: int, closed: Callable[[], object]) -> None:
        """Wait for the pieces of so many choices; `closed` is called where nobody reads to the end.

        Args:
            choices: How many have to end.
            closed: Gives up what is left of the ask.
        """
        self._left = choices
        self._closed = closed
        self._there: deque[Piece] = deque()
        self._wanted: asyncio.Future[None] | None = None

    def put(self, piece: Piece) -> None:
        """Add a piece."""
        self._there.append(piece)
        if piece.finish is not None:
            self._left -= 1
        if self._wanted is not None:
            if not self._wanted.done():
                self._wanted.set_result(None)
            self._wanted = None

    def __aiter__(self) -> "Inbox":
        return self

    async def __anext__(self) -> Piece:
        """Return the next piece, waiting for it where there is none."""
        if not self._there:
            if self._left <= 0:
                raise StopAsyncIteration
            self._wanted = asyncio.get_running_loop().create_future()
            await self._wanted
        return self._there.popleft()

    def ready(self) -> Sequence[Piece]:
        """Return the pieces that nobody has to wait for."""
        if not self._there:
            return ()
        pieces = tuple(self._there)
        self._there.clear()
        return pieces

    async def aclose(self) -> None:
        """Read no further."""
        if self._left > 0:
            self._left = 0
            self._closed()
