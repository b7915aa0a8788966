"""How long collectives and messages take between the ranks there are, sample by sample.

They go through `Group`, as those of training do. A sample is several calls in a row after all ranks
have met, and counts as its slowest rank. The first call of a case is checked: every rank gives its
own number, and what comes back is known. On a GPU events of the device mark the time.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.run.parallel.group import Group, Message
from meshwright.run.parallel.mesh import Mesh
from meshwright.spec.layout import Layout

SAMPLES, LEAST_SAMPLES = 15, 5
MOST_CALLS = 50
SAMPLE_S = 2e-3
"""About how long the calls of one sample take together; longer ones are made once."""


class Asked(NamedTuple):
    """One exchange to be timed."""

    op: str
    """A collective, `one_way` (there and back, halved) or `both_ways` (a message each way)."""
    size_bytes: int
    """Of the whole tensor, as nccl-tests counts it; of one message for the others."""


Sampled = tuple[float, ...]
"""Seconds of one call, once for every sample; empty where time was up."""


def sample_exchanges(
    asked: Sequence[Asked], ranks: int, seconds: float, *, each_s: float = 0.25
) -> list[Sampled]:
    """Time exchanges until `seconds` have passed on rank 0; every rank calls this alike.

    All ranks return the same.
    """
    device = _device()
    mesh = Mesh(Layout(dp=ranks), device=device)
    world = mesh.world
    world.warm(device)
    end = time.monotonic() + seconds
    found = list[Sampled]()
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


def _samples(one: Asked, world: Group, device: torch.device, each_s: float) -> Sampled:
    call = _CALLS[one.op](world, one.size_bytes, device)
    wrong = torch.tensor([float(call.wrong())], device=device)
    if world.all_reduce(wrong).item():
        what = f"{int(wrong.item()):,} elements are wrong"
        raise RuntimeError(f"{one.op} of {one.size_bytes:,} bytes: {what}")
    once = torch.tensor([_elapsed_s(call.run, 2, world, device)], device=device)
    once_s = float(world.all_reduce(once, "max").item())
    calls = max(1, min(MOST_CALLS, round(SAMPLE_S / once_s)))
    number = max(LEAST_SAMPLES, min(SAMPLES, round(each_s / (calls * once_s))))
    mine = [_elapsed_s(call.run, calls, world, device) for _ in range(number)]
    slowest = world.all_reduce(torch.tensor(mine, device=device, dtype=torch.float64), "max")
    return tuple(call.share * seconds for seconds in slowest.tolist())


def _elapsed_s(run: Callable[[], object], calls: int, world: Group, device: torch.device) -> float:
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


class _Call(NamedTuple):
    """An exchange made ready."""

    run: Callable[[], object]
    wrong: Callable[[], int]
    """Runs it once and counts elements that are not what they have to be."""
    share: float = 1.0
    """Of the time of one call that counts."""


def _parts(world: Group, size_bytes: int) -> int:
    """Return elements of one rank's part of a tensor of about a size."""
    return max(1, size_bytes // 4 // world.size)


def _off(got: Tensor, right: Tensor | float) -> int:
    return int((got != right).sum().item())


def _numbers(world: Group, each: int, device: torch.device) -> Tensor:
    """Return what all ranks' parts are side by side: a rank's is its number and one."""
    numbers = torch.arange(1.0, world.size + 1, device=device)
    return numbers.repeat_interleave(each)


def _all_reduce(world: Group, size_bytes: int, device: torch.device) -> _Call:
    elements = max(1, size_bytes // 4)
    tensor = torch.zeros(elements, device=device)

    def wrong() -> int:
        got = world.all_reduce(torch.full((elements,), world.index + 1.0, device=device))
        return _off(got, world.size * (world.size + 1) / 2)

    return _Call(lambda: world.all_reduce(tensor), wrong)


def _all_gather(world: Group, size_bytes: int, device: torch.device) -> _Call:
    each = _parts(world, size_bytes)
    part = torch.full((each,), world.index + 1.0, device=device)

    def run() -> Tensor:
        return world.all_gather(part)

    return _Call(run, lambda: _off(run(), _numbers(world, each, device)))


def _reduce_scatter(world: Group, size_bytes: int, device: torch.device) -> _Call:
    each = _parts(world, size_bytes)
    whole = _numbers(world, each, device)

    def run() -> Tensor:
        return world.reduce_scatter(whole)

    return _Call(run, lambda: _off(run(), world.size * (world.index + 1.0)))


def _all_to_all(world: Group, size_bytes: int, device: torch.device) -> _Call:
    each = _parts(world, size_bytes)
    whole = torch.full((each * world.size,), world.index + 1.0, device=device)

    def run() -> Tensor:
        return world.all_to_all(whole)

    return _Call(run, lambda: _off(run(), _numbers(world, each, device)))


def _broadcast(world: Group, size_bytes: int, device: torch.device) -> _Call:
    tensor = torch.full((max(1, size_bytes // 4),), world.index + 1.0, device=device)

    def run() -> Tensor:
        return world.broadcast(tensor)

    return _Call(run, lambda: _off(run(), 1.0))


def _messages(world: Group, size_bytes: int, device: torch.device, *, at_once: bool) -> _Call:
    """Make messages between the first rank and the last: they cross whatever lies between."""
    elements = max(1, size_bytes // 4)
    out = torch.full((elements,), world.index + 1.0, device=device)
    back = torch.zeros(elements, device=device)
    first, last = 0, world.size - 1
    peer = {first: last, last: first}.get(world.index)

    def run() -> None:
        if peer is None:
            return
        there, here = Message(out, peer, sends=True), Message(back, peer, sends=False)
        turns = [[there, here]]
        if not at_once:
            turns = [[there], [here]] if world.index == first else [[here], [there]]
        for messages in turns:
            for pending in world.exchange(messages):
                pending.wait()

    def wrong() -> int:
        run()
        return 0 if peer is None else _off(back, peer + 1.0)

    return _Call(run, wrong, 1.0 if at_once else 0.5)


def _one_way(world: Group, size_bytes: int, device: torch.device) -> _Call:
    return _messages(world, size_bytes, device, at_once=False)


def _both_ways(world: Group, size_bytes: int, device: torch.device) -> _Call:
    return _messages(world, size_bytes, device, at_once=True)


_CALLS: dict[str, Callable[[Group, int, torch.device], _Call]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "one_way": _one_way,
    "both_ways": _both_ways,
}
OPS = tuple(_CALLS)
