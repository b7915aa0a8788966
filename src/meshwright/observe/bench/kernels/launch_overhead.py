"""What it takes to launch work and to get memory, beside the work itself.

host         the host's time for one small operation of torch
kernel       the device's time for one small kernel of a stream, from one to the next
graph        the host's time to launch a CUDA graph of so many nodes
graph_node   the device's time for one small kernel within a graph
layer_…      the host's time for one layer's forward or backward pass (`layer_overhead`)
allocate     the host's time to get a tensor from torch's own store and give it back
malloc       the same from the driver, and
free         giving it back to the driver

A processor has `host` and `allocate` alone, and does the work of an operation in the same time.
"""

import time
from collections.abc import Callable

from meshwright.observe.bench.bench_case import BenchCase
from meshwright.observe.bench.bench_family import BenchFamily, BenchTarget, Size
from meshwright.observe.bench.kernels.layer_overhead import KINDS, PASSES, make_layer_sampler
from meshwright.observe.bench.timing import Call, TimedWork

MIB = 1 << 20
OPERATIONS = ("add", "linear", "norm")
NODES = (100, 1000, 10)
ALLOCATION_BYTES = (256 * MIB, 32 * MIB)
"""What is asked of the driver: torch asks it for more than less than 10 MiB."""
LAUNCHES_PER_SAMPLE = 100
"""Launches of one sample: more would fill the driver's queue, and the host would wait for it."""
QUEUED_CYCLES = 6_000_000
"""How long the device is kept from a queue of kernels, so that launching does not set their pace:
3 ms at 2 GHz, where the host launches a hundred in one."""


def list_launch_cases(size: Size, on_gpu: bool) -> tuple[BenchCase, ...]:
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
        *(_case(name, bytes=each) for each in ALLOCATION_BYTES for name in ("malloc", "free")),
    )


def _case(name: str, **sizes: int | str) -> BenchCase:
    return BenchCase(family="launch_overhead", name=name, sizes=dict(sizes))


def prepare_launch(case: BenchCase, place: BenchTarget) -> TimedWork | None:
    """Make what a sample needs."""
    return TimedWork((), sample=_SAMPLES[case.name](case, place))


def _waiting(place: BenchTarget) -> Call:
    """Return what waits until the device has nothing left to do."""
    import torch

    return (lambda: torch.cuda.synchronize(place.device)) if place.on_gpu else (lambda: None)


def _host(case: BenchCase, place: BenchTarget) -> Callable[[], float]:
    call, wait = _small(case.text("operation"), place), _waiting(place)

    def sample() -> float:
        wait()
        begun = time.perf_counter()
        for _ in range(LAUNCHES_PER_SAMPLE):
            call()
        return (time.perf_counter() - begun) / LAUNCHES_PER_SAMPLE

    return sample


def _small(operation: str, place: BenchTarget) -> Call:
    """Return an operation whose work is nothing beside its launch."""
    import torch
    from torch.nn.functional import linear

    from meshwright.run.kernels.norm.rms_norm import rms_norm

    x, weight = torch.randn(8, 64, device=place.device), torch.randn(64, 64, device=place.device)
    scale = weight[0].clone()
    calls: dict[str, Call] = {
        "add": lambda: x.add_(1.0),
        "linear": lambda: linear(x, weight),
        "norm": lambda: rms_norm(x, scale, 1e-5),
    }
    return calls[operation]


def _kernel(_: BenchCase, place: BenchTarget) -> Callable[[], float]:
    import torch

    call, wait = _small("add", place), _waiting(place)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]

    def sample() -> float:
        wait()
        torch.cuda._sleep(QUEUED_CYCLES)  # type: ignore[no-untyped-call]  # noqa: SLF001
        begin.record()
        for _ in range(LAUNCHES_PER_SAMPLE):
            call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / LAUNCHES_PER_SAMPLE

    return sample


def _recorded(case: BenchCase, place: BenchTarget) -> Call:
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


def _graph(case: BenchCase, place: BenchTarget) -> Callable[[], float]:
    replay, wait = _recorded(case, place), _waiting(place)

    def sample() -> float:
        wait()
        begun = time.perf_counter()
        replay()
        return time.perf_counter() - begun

    return sample


def _graph_node(case: BenchCase, place: BenchTarget) -> Callable[[], float]:
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


def _allocate(case: BenchCase, place: BenchTarget) -> Callable[[], float]:
    import torch

    size = case.size("bytes")

    def sample() -> float:
        begun = time.perf_counter()
        for _ in range(LAUNCHES_PER_SAMPLE):
            torch.empty(size, dtype=torch.uint8, device=place.device)
        return (time.perf_counter() - begun) / LAUNCHES_PER_SAMPLE

    return sample


def _driver(case: BenchCase, place: BenchTarget) -> Callable[[], float]:
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


_SAMPLES: dict[str, Callable[[BenchCase, BenchTarget], Callable[[], float]]] = {
    "host": _host,
    "kernel": _kernel,
    "graph": _graph,
    **{f"layer_{one}": make_layer_sampler for one in PASSES},
    "graph_node": _graph_node,
    "allocate": _allocate,
    "malloc": _driver,
    "free": _driver,
}

LAUNCH_FAMILY = BenchFamily(
    "launch_overhead",
    "launching and getting memory",
    list_launch_cases,
    prepare_launch,
    runs_on_device=False,
    typical_s={"quick": 8.0, "full": 12.0},
)
