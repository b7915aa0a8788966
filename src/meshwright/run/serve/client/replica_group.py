"""`ReplicaGroup`: engines that sleep, wake and update weights together, all of them or none.

Where one of them cannot, the others go back to what they were, and the error says which one it was
and why. While they change, no asks are taken: an answer by old weights beside one by new weights
would be told apart by nobody.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.run.serve.engine_client import (
    MEMORY_TAGS,
    EngineClient,
    EngineDeadError,
    MemoryTag,
    SleepableEngine,
    WeightUpdatableEngine,
)

_E = TypeVar("_E")


class _GroupOperation(NamedTuple):
    """Something that all engines do, and how it is told."""

    can: str
    """What one of them cannot do, where it fails."""
    meanwhile: str
    back: str = "the others are unchanged"
    """What becomes of the others then."""


_SLEEP = _GroupOperation("sleep", "the engines are going to sleep")
_DISCARD = _GroupOperation("discard its weights", "the engines are going to sleep")
_WAKE = _GroupOperation("wake up", "the engines are waking up", "the others still sleep")
_UPDATE = _GroupOperation("update its weights", "the engines are updating their weights")


class ReplicaGroup:
    """The engines behind a router, where all of them have to do the same."""

    def __init__(
        self, engines: Sequence[EngineClient], busy: Callable[[], bool], weights: str = ""
    ) -> None:
        """Change engines that are not `busy`; `weights` is the folder that theirs are from."""
        self._engines, self._busy, self._weights = engines, busy, weights
        self._changing = self._apart = ""
        self._one_at_a_time = asyncio.Lock()

    def health_problem(self) -> str:
        """Say why none of them may answer at the moment; empty where they may."""
        return self._changing or self._apart

    def is_sleeping(self) -> bool:
        """Tell whether any of them sleeps."""
        return any(
            isinstance(engine, SleepableEngine) and engine.is_sleeping() for engine in self._engines
        )

    def sleep_level(self) -> int:
        """Return how deep the deepest of them sleeps; 0 where all are awake."""
        levels = (one.sleep_level() for one in self._engines if isinstance(one, SleepableEngine))
        return max(levels, default=0)

    async def sleep(self, level: int) -> None:
        """Let all of them give memory back."""
        async with self._one_at_a_time:
            engines = self._sleepers(_SLEEP)
            awake = [engine for engine in engines if not engine.is_sleeping()]
            await self._all(_SLEEP, awake, lambda one: one.sleep(1), lambda one: one.wake_up())
            if level > 1:
                # What is let go of cannot be brought back, so all of them have to sleep before.
                await self._all(_DISCARD, engines, lambda one: one.sleep(level), None)

    async def wake_up(self, parts: Collection[MemoryTag] = MEMORY_TAGS) -> None:
        """Let all of them take the memory of some parts again."""
        async with self._one_at_a_time:
            engines = self._sleepers(_WAKE)
            asleep = [engine for engine in engines if engine.is_sleeping()]
            await self._all(_WAKE, asleep, lambda one: one.wake_up(parts), lambda one: one.sleep(1))

    async def update_weights(self, path: str) -> None:
        """Let all of them read the weights of a folder."""
        async with self._one_at_a_time:
            engines = [
                engine for engine in self._engines if isinstance(engine, WeightUpdatableEngine)
            ]
            self._check(len(engines), _UPDATE)
            before = self._weights

            async def back(one: WeightUpdatableEngine) -> None:
                if not before:
                    raise EngineDeadError("the folder of its former weights is not known")
                await one.update_weights(before)

            try:
                await self._all(_UPDATE, engines, lambda one: one.update_weights(path), back)
            except _RollbackFailed as error:
                self._apart = str(error)
                raise
            self._weights, self._apart = path, ""

    def _sleepers(self, change: _GroupOperation) -> list[SleepableEngine]:
        engines: list[SleepableEngine] = [
            one for one in self._engines if isinstance(one, SleepableEngine)
        ]
        self._check(len(engines), change)
        return engines

    def _check(self, able: int, change: _GroupOperation) -> None:
        """Raise where it is known beforehand that not all of them can do a thing."""
        if able < len(self._engines):
            what = f"{len(self._engines) - able} of {len(self._engines)} engines"
            raise InputError([Problem("engines", f"{what} cannot {change.can} at all")])
        for engine in self._engines:
            # New weights may be what mends it.
            if (reason := engine.health_problem()) and change is not _UPDATE:
                what = f"{self._name(engine)} is unhealthy: {reason}"
                raise EngineDeadError(f"{what}; nothing was changed")
        if self._busy():
            what = f"cannot {change.can} while requests are running"
            raise InputError([Problem("engines", what, "wait for them, or abort them")])

    async def _all(
        self,
        change: _GroupOperation,
        engines: Sequence[_E],
        do: Callable[[_E], Awaitable[None]],
        undo: Callable[[_E], Awaitable[None]] | None,
    ) -> None:
        """Let all of them do a thing, or none; raise what kept one from it."""
        with self._meanwhile(change.meanwhile):
            errors = await _each(engines, do)
            if not errors:
                return
            done = [engine for engine in engines if id(engine) not in errors]
            stuck = await _each(done, undo) if undo is not None else {}
        first = next(engine for engine in engines if id(engine) in errors)
        error = errors[id(first)]
        if done and (undo is None or stuck):
            raise _RollbackFailed(
                self._told(change, first, error, "the others are changed already")
            )
        if isinstance(error, InputError):
            problems = [
                problem._replace(what=f"{self._name(first)} cannot {change.can}: {problem.what}")
                for problem in error.problems
            ]
            raise InputError(problems)
        raise EngineDeadError(self._told(change, first, error, change.back))

    @contextmanager
    def _meanwhile(self, what: str) -> Iterator[None]:
        self._changing = what
        try:
            yield
        finally:
            self._changing = ""

    def _told(self, change: _GroupOperation, engine: object, error: Exception, rest: str) -> str:
        return f"{self._name(engine)} cannot {change.can}: {error}; {rest}"

    def _name(self, engine: object) -> str:
        number = next(n for n, one in enumerate(self._engines, 1) if one is engine)
        return f"engine {number} of {len(self._engines)}"


class _RollbackFailed(EngineDeadError):
    """Some engines did a thing, one could not, and the others could not go back."""


async def _each(
    engines: Sequence[_E], do: Callable[[_E], Awaitable[None]]
) -> dict[int, MeshwrightError]:
    """Let engines do a thing side by side; return what went wrong with which."""

    async def one(engine: _E) -> MeshwrightError | None:
        try:
            await do(engine)
        except MeshwrightError as error:
            return error
        except Exception as error:  # noqa: BLE001  whatever it is, the others have to go back
            return EngineDeadError(f"{type(error).__name__}: {error}")
        return None

    found = await asyncio.gather(*(one(engine) for engine in engines))
    pairs = zip(engines, found, strict=True)
    return {id(engine): error for engine, error in pairs if error is not None}
