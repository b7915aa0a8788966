"""`OutputStream`: the pieces of one ask, between the engine that makes them and the server.

It is used within one event loop. Whoever reads late gets all that is there at once, which is what
keeps a server from writing every token by itself when there are more than it can write.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from meshwright.run.serve.request import RequestOutput


class OutputStream:
    """An iterator of pieces that ends when each choice has ended."""

    __slots__ = ("_closed", "_error", "_left", "_there", "_wanted")

    def __init__(self, choices: int, closed: Callable[[], object]) -> None:
        """Wait for the pieces of so many choices; `closed` is called where nobody reads to the end.

        Args:
            choices: How many have to end.
            closed: Gives up what is left of the ask.
        """
        self._left = set(range(choices))
        self._closed = closed
        self._error: Exception | None = None
        self._there: deque[RequestOutput] = deque()
        self._wanted: asyncio.Future[None] | None = None

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return not self._left

    def put(self, output: RequestOutput) -> None:
        """Add a piece."""
        self._there.append(output)
        if output.finish_reason is not None:
            self._left.discard(output.index)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End all of it: whoever reads gets this error behind what is there already."""
        self._error = error
        self._left.clear()
        self._wake()

    def _wake(self) -> None:
        if self._wanted is not None:
            if not self._wanted.done():
                self._wanted.set_result(None)
            self._wanted = None

    def __aiter__(self) -> "OutputStream":
        return self

    async def __anext__(self) -> RequestOutput:
        """Return the next piece, waiting for it where there is none."""
        if not self._there and self._left:
            self._wanted = asyncio.get_running_loop().create_future()
            await self._wanted
        if self._there:
            return self._there.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopAsyncIteration

    def take_available(self) -> Sequence[RequestOutput]:
        """Return the pieces that nobody has to wait for."""
        if not self._there:
            return ()
        pieces = tuple(self._there)
        self._there.clear()
        return pieces

    async def aclose(self) -> None:
        """Read no further."""
        if self._left:
            self._left.clear()
            self._closed()
