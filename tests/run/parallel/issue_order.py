"""Writes down, on one rank, when exchanges are issued and waited for, and what computes in between.

An exchange runs on its own from its issue to its wait: on a GPU on a stream of NCCL, with gloo on
threads of its own. What computes between the two hides it; what computes elsewhere cannot. So the
order of these marks on each rank shows overlap without a clock.
"""

# Autograd's own functions are untyped.
# mypy: allow-untyped-calls

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from meshwright.run.parallel.flight_recorder import FlightRecord, FlightRecorder
from meshwright.run.parallel.group_coordinator import AsyncWork, GroupCoordinator


class Event(NamedTuple):
    """One mark on a rank."""

    kind: Literal["issue", "wait", "begin", "end"]
    what: str
    """An exchange, such as `all_gather of shard`, or what is computed."""
    number: int = 0
    """Of an exchange in its group."""


class Exchange(NamedTuple):
    """An exchange and what hides it."""

    what: str
    issued: int
    """Place of its issue among the rank's events."""
    waited: int
    """Place of its first wait; that of the end where nobody waits."""
    begun: tuple[str, ...]
    """What began while it was on its way."""
    behind: tuple[str, ...]
    """What both began and ended while it was."""


class IssueOrder:
    """The marks of one rank, in order."""

    def __init__(self, journal: FlightRecorder) -> None:
        self.events: list[Event] = []
        self._recorder = journal.timeline_recorder
        self._open: dict[str, AbstractContextManager[None]] = {}
        note, enter = journal.record, journal.begin_wait

        def noted(*given: Any, **named: Any) -> FlightRecord:
            entry = note(*given, **named)
            self.events.append(Event("issue", _name(entry), entry.sequence_number))
            return entry

        def entered(entry: FlightRecord) -> int:
            self.events.append(Event("wait", _name(entry), entry.sequence_number))
            return enter(entry)

        journal.record, journal.begin_wait = noted, entered  # type: ignore[method-assign]

    def begin(self, what: str) -> None:
        """Mark the beginning of a computation, in the rank's timeline too where it has one."""
        self.events.append(Event("begin", what))
        if self._recorder is not None:
            self._open[what] = self._recorder.span(what)
            self._open[what].__enter__()

    def end(self, what: str) -> None:
        """Mark its end."""
        self.events.append(Event("end", what))
        if what in self._open:
            self._open.pop(what).__exit__(None, None, None)

    def around(self, call: Callable[..., Any], what: str) -> Callable[..., Any]:
        """Return a function that marks its calls."""

        def marked(*given: Any, **named: Any) -> Any:
            self.begin(what)
            found = call(*given, **named)
            self.end(what)
            return found

        return marked

    def watch_backward(self, name: str, module: nn.Module) -> None:
        """Mark the backward pass of a module; called before others hook themselves to it.

        A weight that is waited for when a gradient reaches the output is so before the beginning.
        """

        def enter(_: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
            return _marked(given, lambda: self.end(f"backward {name}"))

        def leave(_: nn.Module, __: tuple[Any, ...], found: Any) -> Any:
            several = found if isinstance(found, tuple) else (found,)
            marked = _marked(several, lambda: self.begin(f"backward {name}"))
            return marked if isinstance(found, tuple) else marked[0]

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)

    def watch_forward(self, name: str, module: nn.Module) -> None:
        """Mark the forward pass of a module; called after others have hooked themselves to it.

        What their hooks wait for before the pass is before its beginning, and what they do after
        it comes after its end.
        """

        def enter(_: nn.Module, __: tuple[Any, ...]) -> None:
            self.begin(f"forward {name}")

        def leave(_: nn.Module, __: tuple[Any, ...], ___: Any) -> None:
            self.end(f"forward {name}")

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, prepend=True)


def exchanges(events: Sequence[Event]) -> list[Exchange]:
    """Return every exchange of a rank in the order of issue, with what hides it."""
    waits: dict[tuple[str, int], int] = {}
    for place, event in enumerate(events):
        if event.kind == "wait":
            waits.setdefault((event.what, event.number), place)
    found = []
    for place, event in enumerate(events):
        if event.kind == "issue":
            until = waits.get((event.what, event.number), len(events))
            inside = events[place + 1 : until]
            begun = tuple(each.what for each in inside if each.kind == "begin")
            found.append(Exchange(event.what, place, until, begun, tuple(_whole(inside))))
    return found


def _whole(events: Sequence[Event]) -> Iterator[str]:
    """Yield what both begins and ends among some events."""
    begun: list[str] = []
    for event in events:
        if event.kind == "begin":
            begun.append(event.what)
        elif event.kind == "end" and event.what in begun:
            begun.remove(event.what)
            yield event.what


@contextmanager
def waiting_at_once() -> Iterator[None]:
    """Let every exchange be waited for where it is issued: a world in which nothing overlaps."""

    def at_once(start: Callable[..., AsyncWork]) -> Callable[..., AsyncWork]:
        return lambda *given, **named: AsyncWork(start(*given, **named).wait())

    def exchange(group: GroupCoordinator, messages: Any, **named: Any) -> list[AsyncWork]:
        return [AsyncWork(each.wait()) for each in plain(group, messages, **named)]

    plain = GroupCoordinator.batch_send_recv
    names = ("start_all_reduce", "start_all_gather", "start_reduce_scatter", "start_all_to_all")
    changed: dict[str, Any] = {name: at_once(getattr(GroupCoordinator, name)) for name in names}
    with patch.multiple(GroupCoordinator, batch_send_recv=exchange, **changed):
        yield


class _Mark(torch.autograd.Function):
    """Hands tensors on, and tells when all their gradients are there."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *tensors: Tensor) -> Any:
        ctx.call = call
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.call()
        return None, *grads


def _marked(given: tuple[Any, ...], call: Callable[[], None]) -> tuple[Any, ...]:
    learning = [
        place for place, each in enumerate(given) if isinstance(each, Tensor) and each.requires_grad
    ]
    if not learning:
        return given
    found = list(given)
    for place, each in zip(
        learning, _Mark.apply(call, *(given[at] for at in learning)), strict=True
    ):
        found[place] = each
    return tuple(found)


def _name(entry: FlightRecord) -> str:
    return f"{entry.op} of {entry.group}"
