"""`Serves`: what the server asks of whatever answers. Engines have it, and so have routers."""

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Literal, Protocol, get_args, runtime_checkable

from meshwright.errors import MeshwrightError
from meshwright.run.serve.asked import Ask, Gauges, Piece

Memory = Literal["weights", "cache"]
"""What an engine gives back when it sleeps. Where new weights come before the cache wakes, no GPU
has both beside a version that lies aside."""
MEMORY: tuple[Memory, ...] = get_args(Memory)


class EngineBroken(MeshwrightError):
    """The engine ended, and takes no asks at the moment."""


class Serves(Protocol):
    """Answers asks, many at a time; all methods are called in the server's event loop."""

    max_length: int
    """Tokens of a prompt with its answer."""
    embed_length: int
    """Tokens of a prompt that is embedded."""

    def answer(self, ask: Ask, /) -> AsyncIterator[Piece]:
        """Answer; closing the iterator cancels what is left.

        Raises `InputError` before the first piece where the ask cannot be answered at all.
        """

    async def embed(
        self, prompts: Sequence[tuple[int, ...]], /, adapter: str | None = None
    ) -> list[list[float]]:
        """Return a vector of length one for each prompt, of the model or of one adapter."""

    def gauges(self) -> Gauges:
        """Return what it does at this moment."""

    def ill(self) -> str:
        """Say why no forward progress is made while requests wait; empty where all is well."""

    async def close(self) -> None:
        """Let go of everything; answers under way end with an error."""


@runtime_checkable
class LetsGo(Protocol):
    """An engine that can be made to give up what it holds while it makes no progress."""

    def let_go(self, why: str) -> None:
        """End all answers and vectors under way with `EngineBroken`, and cancel them there."""


@runtime_checkable
class Sleeps(Protocol):
    """An engine that can give up its memory for a while, as reinforcement learning asks."""

    async def sleep(self, level: int) -> None:
        """Free the cache and the weights; level 1 keeps the weights in host memory."""

    async def wake(self, parts: Collection[Memory] = MEMORY) -> None:
        """Take the memory of some parts again."""

    def asleep(self) -> bool:
        """Tell whether any part of it sleeps."""

    def sleep_level(self) -> int:
        """Return how deep it sleeps: 0 not at all, 2 where its weights are nowhere, else 1."""


@runtime_checkable
class Renews(Protocol):
    """An engine whose weights can be replaced while it stands."""

    async def update_weights(self, path: str) -> None:
        """Read the weights of a folder in place of the present ones."""
