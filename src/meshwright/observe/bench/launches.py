"""What it takes to launch work and to get memory, beside the work itself.

host         the host's time for one small operation of torch
kernel       the device's time for one small kernel of a stream, from one to the next
graph        the host's time to launch a CUDA graph of so many nodes
graph_node   the device's time for one small kernel within a graph
layer_…      the host's time for one layer's forward or backward pass (`layer_launches`)
allocate     the host's time to get a tensor from torch's own store and give it back
malloc       the same from the driver, and
free         giving it back to the driver

A processor has `host` and `allocate` alone, and does the work of an operation in the same time.
"""

import time
from collections.abc import Callable

from meshwright.observe.bench.case import Case
from meshwright.observe.bench.family import Family, Place, Size
from meshwright.observe.bench.layer_launches import KINDS, PASSES, layer_sample
from meshwright.observe.bench.timing import Call, Work

MIB = 1 << 20
OPERATIONS = ("add", "linear", "norm")
NODES = (100, 1000, 10)
AMOUNTS = (256 * MIB, 32 * MIB)
"""What is asked of the driver: torch asks it for more than less than 10 MiB."""
TIMES = 100
"""Launches of one sample: more would fill the driver's queue, and the host would wait for it."""
QUEUED_CYCLES = 6_000_000
"""How long the device is kept from a queue of kernels, so that launching does not set their pace:
3 ms at 2 GHz, where the host launches a hundred in one."""


def cases(size: Size, on_gpu: bool) -> tuple[Case, ...]:
    """Return what a calibration needs first."""
    if not on_gpu:
        # A product would start threads, whose waking is no launch.
        return _case("host", operation="add"), _case("allocate", bytes=MIB)
    first = (
        *(_case("host", operation=each) for each in OPERATIONS),
        _case("kernel"),
        _case("graph", nodes=NODES[0]),
        *(_case(f"layer_{one}", kind=kind) for kind in KINDS for one in PASSES),
    )
    if size == "quick":
        return first
    return (
        *first,
        _case("graph_node", nodes=NODES[1]),
        _case("allocate", bytes=MIB),
        *(_case("graph", nodes=each) for each in NODES[1:]),
        *(_case(name, bytes=each) for each in AMOUNTS for name in ("malloc", "free")),
    )


def _case(name: str, **sizes: int | str) -> Case:
    return Case(family="launches", name=name, sizes=dict(sizes))


def work(case: Case, place: Place) -> Work | None:
    """Make what a sample needs."""
    return Work((), sample=_SAMPLES[case.name](case, place))


def _waiting(place: Place) -> Call:
    """Return what waits until the device has nothing left to do."""
    import torch

    return (lambda: torch.cuda.synchronize(place.device)) if place.on_gpu else (lambda: None)


def _host(case: Case, place: Place) -> Callable[[], float]:
    call, wait = _small(case.word("operation"), place), _waiting(place)

    def sample() -> float:
        wait()
        begun = time.perf_counter()
        for _ in range(TIMES):
            call()
        return (time.perf_counter() - begun) / TIMES

    return sample


def _small(operation: str, place: Place) -> Call:
    """Return an operation whose work is nothing beside its launch."""
    import torch
    from torch.nn.functional import linear

    from meshwright.run.kernels.rms_norm import rms_norm

    x, weight = torch.randn(8, 64, device=place.device), torch.randn(64, 64, device=place.device)
    scale = weight[0].clone()
    calls: dict[str, Call] = {
        "add": lambda: x.add_(1.0),
        "linear": lambda: linear(x, weight),
        "norm": lambda: rms_norm(x, scale, 1e-5),
    }
    return calls[operation]


def _kernel(_: Case, place: Place) -> Callable[[], float]:
    import torch

    call, wait = _small("add", place), _waiting(place)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def sample() -> float:
        wait()
        torch.cuda._sleep(QUEUED_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001
        begin.record()
        for _ in range(TIMES):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / TIMES

    return sample


def _recorded(case: Case, place: Place) -> Call:
    import torch

    call, graph = _small("add", place), torch.cuda.CUDAGraph()
    call()
    with torch.cuda.graph(graph):
        for _ in range(case.size("nodes")):
            call()
    graph.replay()

    def replay(_held: Call = call) -> None:
        # A graph does not keep the tensors it works on; what made it does.
        graph.replay()

    return replay


def _graph(case: Case, place: Place) -> Callable[[], float]:
    replay, wait = _recorded(case, place), _waiting(place)

    def sample() -> float:
        wait()
        begun = time.perf_counter()
        replay()
        return time.perf_counter() - begun

    return sample


def _graph_node(case: Case, place: Place) -> Callable[[], float]:
    import torch

    replay, wait, nodes = _recorded(case, place), _waiting(place), case.size("nodes")
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def sample() -> float:
        wait()
        torch.cuda._sleep(QUEUED_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001
        begin.record()
        replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / nodes

    return sample


def _allocate(case: Case, place: Place) -> Callable[[], float]:
    import torch

    size = case.size("bytes")

    def sample() -> float:
        begun = time.perf_counter()
        for _ in range(TIMES):
            torch.empty(size, dtype=torch.uint8, device=place.device)
        return (time.perf_counter() - begun) / TIMES

    return sample


def _driver(case: Case, place: Place) -> Callable[[], float]:
    import torch

    size, wait = case.size("bytes"), _waiting(place)

    def sample() -> float:
        # With nothing in torch's store a tensor comes from the driver, and goes back to it.
        torch.cuda.empty_cache()
        wait()
        begun = time.perf_counter()
        held = [torch.empty(size, dtype=torch.uint8, device=place.device)]
        made = time.perf_counter()
        held.clear()
        torch.cuda.empty_cache()
        freed = time.perf_counter()
        return made - begun if case.name == "malloc" else freed - made

    return sample


_SAMPLES: dict[str, Callable[[Case, Place], Callable[[], float]]] = {
    "host": _host,
    "kernel": _kernel,
    "graph": _graph,
    **{f"layer_{one}": layer_sample for one in PASSES},
    "graph_node": _graph_node,
    "allocate": _allocate,
    "malloc": _driver,
    "free": _driver,
}

LAUNCHES = Family(
    "launches",
    "launching and getting memory",
    cases,
    work,
    on_device=False,
    usual_s={"quick": 8.0, "full": 12.0},
)
