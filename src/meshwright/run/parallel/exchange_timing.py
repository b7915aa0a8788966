"""Collectives and messages between ranks, made ready to be timed: what is called, and is it right?

They go through `GroupCoordinator`, as those of training do. Every rank gives its own number, so
that what comes back is known. Knows no clock.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.run.parallel.group_coordinator import GroupCoordinator, P2PMessage
from meshwright.run.parallel.mesh import Mesh
from meshwright.spec.layout import Layout


class TimedExchange(NamedTuple):
    """An exchange made ready."""

    run: Callable[[], object]
    count_wrong: Callable[[], int]
    """Runs it once and counts elements that are not what they have to be."""
    time_fraction: float = 1.0
    """Of the time of one call that counts."""


def _parts(group: GroupCoordinator, size_bytes: int) -> int:
    """Return elements of one rank's part of a tensor of about a size."""
    return max(1, size_bytes // 4 // group.size)


def _off(got: Tensor, right: Tensor | float) -> int:
    return int((got != right).sum().item())


def _numbers(group: GroupCoordinator, each: int, device: torch.device) -> Tensor:
    """Return what all ranks' parts are side by side: a rank's is its number and one."""
    numbers = torch.arange(1.0, group.size + 1, device=device)
    return numbers.repeat_interleave(each)


def _all_reduce(group: GroupCoordinator, size_bytes: int, device: torch.device) -> TimedExchange:
    elements = max(1, size_bytes // 4)
    tensor = torch.zeros(elements, device=device)

    def wrong() -> int:
        got = group.all_reduce(torch.full((elements,), group.index + 1.0, device=device))
        return _off(got, group.size * (group.size + 1) / 2)

    return TimedExchange(lambda: group.all_reduce(tensor), wrong)


def _all_gather(group: GroupCoordinator, size_bytes: int, device: torch.device) -> TimedExchange:
    each = _parts(group, size_bytes)
    part = torch.full((each,), group.index + 1.0, device=device)

    def run() -> Tensor:
        return group.all_gather(part)

    return TimedExchange(run, lambda: _off(run(), _numbers(group, each, device)))


def _reduce_scatter(
    group: GroupCoordinator, size_bytes: int, device: torch.device
) -> TimedExchange:
    each = _parts(group, size_bytes)
    whole = _numbers(group, each, device)

    def run() -> Tensor:
        return group.reduce_scatter(whole)

    return TimedExchange(run, lambda: _off(run(), group.size * (group.index + 1.0)))


def _all_to_all(group: GroupCoordinator, size_bytes: int, device: torch.device) -> TimedExchange:
    each = _parts(group, size_bytes)
    whole = torch.full((each * group.size,), group.index + 1.0, device=device)

    def run() -> Tensor:
        return group.all_to_all(whole)

    return TimedExchange(run, lambda: _off(run(), _numbers(group, each, device)))


def _broadcast(group: GroupCoordinator, size_bytes: int, device: torch.device) -> TimedExchange:
    tensor = torch.full((max(1, size_bytes // 4),), group.index + 1.0, device=device)

    def run() -> Tensor:
        return group.broadcast(tensor)

    return TimedExchange(run, lambda: _off(run(), 1.0))


def prepare_p2p(
    group: GroupCoordinator,
    size_bytes: int,
    device: torch.device,
    *,
    at_once: bool,
    between: tuple[int, int] | None = None,
) -> TimedExchange:
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
        there, here = P2PMessage(out, peer, is_send=True), P2PMessage(back, peer, is_send=False)
        turns = [[there, here]]
        if not at_once:
            turns = [[there], [here]] if group.index == first else [[here], [there]]
        for messages in turns:
            for pending in group.batch_send_recv(messages):
                pending.wait()

    def wrong() -> int:
        run()
        return 0 if peer is None else _off(back, peer + 1.0)

    return TimedExchange(run, wrong, 1.0 if at_once else 0.5)


_CALLS: dict[str, Callable[[GroupCoordinator, int, torch.device], TimedExchange]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "one_way": partial(prepare_p2p, at_once=False),
    "both_ways": partial(prepare_p2p, at_once=True),
}

TIMED_OPS = tuple(_CALLS)


def prepare_exchange(
    op: str, group: GroupCoordinator, size_bytes: int, device: torch.device
) -> TimedExchange:
    """Return one of `TIMED_OPS` within a group, made ready.

    Sizes are those of the whole tensor, as nccl-tests counts them; of messages that of one.
    """
    return _CALLS[op](group, size_bytes, device)


SAMPLES, MIN_SAMPLES = 15, 5

MAX_CALLS_PER_SAMPLE = 50

SAMPLE_S = 2e-3
"""About how long the calls of one sample take together; longer ones are made once."""


class ExchangeCase(NamedTuple):
    """One exchange to be timed."""

    op: str
    """A collective, `one_way` (there and back, halved) or `both_ways` (a message each way)."""
    size_bytes: int
    """Of the whole tensor, as nccl-tests counts it; of one message for the others."""


ExchangeSamples = tuple[float, ...]
"""Seconds of one call, once for every sample; empty where time was up."""


def sample_exchanges(
    asked: Sequence[ExchangeCase], ranks: int, seconds: float, *, each_s: float = 0.25
) -> list[ExchangeSamples]:
    """Time exchanges until `seconds` have passed on rank 0; every rank calls this alike.

    All ranks return the same.
    """
    device = _device()
    mesh = Mesh(Layout(dp=ranks), device=device)
    world = mesh.world
    world.warm_up(device)
    end = time.monotonic() + seconds
    found = list[ExchangeSamples]()
    for one in asked:
        go_on = torch.tensor([float(time.monotonic() < end)], device=device)
        if not world.broadcast(go_on).item():
            break
        found.append(_samples(one, world, device, each_s))
    return found + [()] * (len(asked) - len(found))


def _device() -> torch.device:
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _samples(
    one: ExchangeCase, world: GroupCoordinator, device: torch.device, each_s: float
) -> ExchangeSamples:
    call = prepare_exchange(one.op, world, one.size_bytes, device)
    wrong = torch.tensor([float(call.count_wrong())], device=device)
    if world.all_reduce(wrong).item():
        what = f"{int(wrong.item()):,} elements are wrong"
        raise RuntimeError(f"{one.op} of {one.size_bytes:,} bytes: {what}")
    once = torch.tensor([_elapsed_s(call.run, 2, world, device)], device=device)
    once_s = float(world.all_reduce(once, "max").item())
    calls = max(1, min(MAX_CALLS_PER_SAMPLE, round(SAMPLE_S / once_s)))
    number = max(MIN_SAMPLES, min(SAMPLES, round(each_s / (calls * once_s))))
    mine = [_elapsed_s(call.run, calls, world, device) for _ in range(number)]
    slowest = world.all_reduce(torch.tensor(mine, device=device, dtype=torch.float64), "max")
    return tuple(call.time_fraction * seconds for seconds in slowest.tolist())


def _elapsed_s(
    run: Callable[[], object], calls: int, world: GroupCoordinator, device: torch.device
) -> float:
    """Return what one of so many calls takes here, all ranks having met before."""
    world.barrier()
    if device.type != "cuda":
        begun = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - begun) / calls
    torch.cuda.synchronize(device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls
