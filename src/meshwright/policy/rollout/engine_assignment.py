"""`EngineAssigner`: which of several engines draws a sample. It knows no clock and asks no engine.

By group, all samples of a group go to the engine that the group's number says. Whoever draws them
again, after any death or in another run session, asks the same one, and what is computed together,
and with it every bit, follows from numbers alone. By load, each sample goes where the fewest are
under way, as a proxy sends requests.
"""

from typing import Literal

from meshwright.policy.serving.router import RequestRouter

AssignmentPolicy = Literal["by_group", "least-loaded"]


class EngineAssigner:
    """Samples on their way to engines, numbered from 0."""

    def __init__(self, engines: int, how: AssignmentPolicy = "by_group") -> None:
        self._engines = engines
        self._router = RequestRouter(engines) if how == "least-loaded" else None
        self._unnumbered = 0

    def assign(self, group: int | None, prompt_tokens: int) -> int:
        """Choose the engine of a sample; one of no group goes where its turn is."""
        if self._router is not None:
            return self._router.assign(prompt_tokens)
        if group is None:
            self._unnumbered += 1
            group = self._unnumbered
        return group % self._engines

    def release(self, engine: int, prompt_tokens: int) -> None:
        """Say that a sample has come back from its engine, done or not; numbers do not mind."""
        if self._router is not None:
            self._router.release(engine, prompt_tokens)
