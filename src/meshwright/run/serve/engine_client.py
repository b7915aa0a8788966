"""`EngineClient`: the interface between the server and an engine or a router of engines."""

from collections.abc import AsyncIterator, Collection, Sequence
from typing import Literal, Protocol, get_args, runtime_checkable

from meshwright.errors import MeshwrightError
from meshwright.run.serve.engine_stats import EngineStats
from meshwright.run.serve.request import Request, RequestOutput

MemoryTag = Literal["weights", "cache"]
"""What an engine gives back when it sleeps. Where new weights come before the cache wakes, no GPU
has both beside a version that lies aside."""
MEMORY_TAGS: tuple[MemoryTag, ...] = get_args(MemoryTag)


class EngineDeadError(MeshwrightError):
    """The engine ended, and takes no asks at the moment."""


class EngineClient(Protocol):
    """Answers asks, many at a time; all methods are called in the server's event loop."""

    max_model_len: int
    """Tokens of a prompt with its answer."""
    max_embed_len: int
    """Tokens of a prompt that is embedded."""

    def generate(self, request: Request, /) -> AsyncIterator[RequestOutput]:
        """Answer; closing the iterator cancels what is left.

        Raises `InputError` before the first piece where the ask cannot be answered at all.
        """

    async def embed(
        self, prompts: Sequence[tuple[int, ...]], /, adapter: str | None = None
    ) -> list[list[float]]:
        """Return a vector of length one for each prompt, of the model or of one adapter."""

    def stats(self) -> EngineStats:
        """Return what it does at this moment."""

    def health_problem(self) -> str:
        """Say why no forward progress is made while requests wait; empty where all is well."""

    async def close(self) -> None:
        """Let go of everything; answers under way end with an error."""


@runtime_checkable
class AbortableEngine(Protocol):
    """An engine that can be made to give up what it holds while it makes no progress."""

    def abort_all(self, why: str) -> None:
        """End all answers and vectors under way with `EngineDeadError`, and cancel them there."""


@runtime_checkable
class SleepableEngine(Protocol):
    """An engine that can give up its memory for a while, as reinforcement learning asks."""

    async def sleep(self, level: int) -> None:
        """Free the cache and the weights; level 1 keeps the weights in host memory."""

    async def wake_up(self, parts: Collection[MemoryTag] = MEMORY_TAGS) -> None:
        """Take the memory of some parts again."""

    def is_sleeping(self) -> bool:
        """Tell whether any part of it sleeps."""

    def sleep_level(self) -> int:
        """Return how deep it sleeps: 0 not at all, 2 where its weights are nowhere, else 1."""


@runtime_checkable
class WeightUpdatableEngine(Protocol):
    """An engine whose weights can be replaced while it stands."""

    async def update_weights(self, path: str) -> None:
        """Read the weights of a folder in place of the present ones."""
