"""Collectives and messages between ranks, made ready to be timed: what is called, and is it right?

They go through `Group`, as those of training do. Every rank gives its own number, so that what
comes back is known. Knows no clock.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.run.parallel.group import Group, Message


class Call(NamedTuple):
    """An exchange made ready."""

    run: Callable[[], object]
    wrong: Callable[[], int]
    """Runs it once and counts elements that are not what they have to be."""
    share: float = 1.0
    """Of the time of one call that counts."""


def _parts(group: Group, size_bytes: int) -> int:
    """Return elements of one rank's part of a tensor of about a size."""
    return max(1, size_bytes // 4 // group.size)


def _off(got: Tensor, right: Tensor | float) -> int:
    return int((got != right).sum().item())


def _numbers(group: Group, each: int, device: torch.device) -> Tensor:
    """Return what all ranks' parts are side by side: a rank's is its number and one."""
    numbers = torch.arange(1.0, group.size + 1, device=device)
    return numbers.repeat_interleave(each)


def _all_reduce(group: Group, size_bytes: int, device: torch.device) -> Call:
    elements = max(1, size_bytes // 4)
    tensor = torch.zeros(elements, device=device)

    def wrong() -> int:
        got = group.all_reduce(torch.full((elements,), group.index + 1.0, device=device))
        return _off(got, group.size * (group.size + 1) / 2)

    return Call(lambda: group.all_reduce(tensor), wrong)


def _all_gather(group: Group, size_bytes: int, device: torch.device) -> Call:
    each = _parts(group, size_bytes)
    part = torch.full((each,), group.index + 1.0, device=device)

    def run() -> Tensor:
        return group.all_gather(part)

    return Call(run, lambda: _off(run(), _numbers(group, each, device)))


def _reduce_scatter(group: Group, size_bytes: int, device: torch.device) -> Call:
    each = _parts(group, size_bytes)
    whole = _numbers(group, each, device)

    def run() -> Tensor:
        return group.reduce_scatter(whole)

    return Call(run, lambda: _off(run(), group.size * (group.index + 1.0)))


def _all_to_all(group: Group, size_bytes: int, device: torch.device) -> Call:
    each = _parts(group, size_bytes)
    whole = torch.full((each * group.size,), group.index + 1.0, device=device)

    def run() -> Tensor:
        return group.all_to_all(whole)

    return Call(run, lambda: _off(run(), _numbers(group, each, device)))


def _broadcast(group: Group, size_bytes: int, device: torch.device) -> Call:
    tensor = torch.full((max(1, size_bytes // 4),), group.index + 1.0, device=device)

    def run() -> Tensor:
        return group.broadcast(tensor)

    return Call(run, lambda: _off(run(), 1.0))


def messages(
    group: Group,
    size_bytes: int,
    device: torch.device,
    *,
    at_once: bool,
    between: tuple[int, int] | None = None,
) -> Call:
    """Return messages between two ranks, each way; of one way half of the time counts.

    Not said between which, it is the first and the last: they cross whatever lies between.
    """
    elements = max(1, size_bytes // 4)
    out = torch.full((elements,), group.index + 1.0, device=device)
    back = torch.zeros(elements, device=device)
    first, last = between or (0, group.size - 1)
    peer = {first: last, last: first}.get(group.index)

    def run() -> None:
        if peer is None:
            return
        there, here = Message(out, peer, sends=True), Message(back, peer, sends=False)
        turns = [[there, here]]
        if not at_once:
            turns = [[there], [here]] if group.index == first else [[here], [there]]
        for messages in turns:
            for pending in group.exchange(messages):
                pending.wait()

    def wrong() -> int:
        run()
        return 0 if peer is None else _off(back, peer + 1.0)

    return Call(run, wrong, 1.0 if at_once else 0.5)


_CALLS: dict[str, Callable[[Group, int, torch.device], Call]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "one_way": partial(messages, at_once=False),
    "both_ways": partial(messages, at_once=True),
}
OPS = tuple(_CALLS)


def call_of(op: str, group: Group, size_bytes: int, device: torch.device) -> Call:
    """Return one of `OPS` within a group, made ready.

    Sizes are those of the whole tensor, as nccl-tests counts them; of messages that of one.
    """
    return _CALLS[op](group, size_bytes, device)
