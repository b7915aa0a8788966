"""How long collectives and messages take between the ranks there are, sample by sample.

A sample is several calls in a row after all ranks have met, and counts as its slowest rank. The
first call of a case is checked. On a GPU events of the device mark the time.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwright.run.parallel.exchange_calls import call_of
from meshwright.run.parallel.group import Group
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
    call = call_of(one.op, world, one.size_bytes, device)
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
