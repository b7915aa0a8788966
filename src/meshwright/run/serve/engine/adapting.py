"""`Adapting`: which adapters the answers under way use, for who deals requests out by them."""

from collections.abc import Iterable
from typing import Any

from meshwright.policy.sequences import State
from meshwright.run.serve.engine.answer import Answer


class Adapting:
    """The open answers of an engine that use an adapter."""

    def __init__(self) -> None:
        self._open: dict[Answer, None] = {}

    def add(self, answers: Iterable[Answer]) -> None:
        """Count answers that were taken, where they use one."""
        for answer in answers:
            if answer.ask.adapter is not None and answer.finish is None:
                self._open[answer] = None

    def drop(self, answer: Answer) -> None:
        """Count an answer no longer."""
        self._open.pop(answer, None)

    def told(self) -> dict[str, Any]:
        """Return the adapters by the names of gauges; any thread may ask."""
        running, waiting = set[str](), set[str]()
        for answer in list(self._open):
            name, sequence = answer.ask.adapter, answer.sequence
            if name is None:
                continue
            if answer.row >= 0:
                running.add(name)
            elif sequence.state is State.WAITING and sequence.order >= 0:  # no fork to be
                waiting.add(name)
        return {
            "running_adapters": tuple(sorted(running)),
            "waiting_adapters": tuple(sorted(waiting)),
        }
