"""Work bound by memory: every class that `predict/cost` has a share of the bandwidth for.

The trainer's own kernels run, as a step calls them, on several sets of inputs in turn where one
would stay in the cache. A case is named for its class and says which kernel it is.
"""

from itertools import zip_longest

from meshwright.observe.bench.bench_case import BenchCase
from meshwright.observe.bench.bench_family import BenchFamily, BenchTarget, Size
from meshwright.observe.bench.kernels.bench_kernel import BenchKernel, Sizes, TensorFactory
from meshwright.observe.bench.kernels.layer_kernels import LAYER_KERNELS
from meshwright.observe.bench.kernels.step_kernels import STEP_KERNELS
from meshwright.observe.bench.timing import TimedWork, count_input_sets

KERNELS = (*LAYER_KERNELS, *STEP_KERNELS)
_BY_NAME = {kernel.name: kernel for kernel in KERNELS}
_COUNTS = ("tokens", "parameters")
"""Sizes that a held-out case differs in."""


def list_memory_bound_cases(size: Size, on_gpu: bool) -> tuple[BenchCase, ...]:
    """Return one size of every kernel, then in a full bench the second of each, and so on."""
    if not on_gpu:
        return tuple(one.build_case(one.cpu_sizes) for one in KERNELS if not one.needs_fp8)
    first = [one.build_case(one.gpu_sizes[0]) for one in KERNELS if one.in_quick_bench]
    if size == "quick":
        return tuple(first)
    rounds = zip_longest(*([one.build_case(sizes) for sizes in one.gpu_sizes] for one in KERNELS))
    every = [*first, *(case for each in rounds for case in each if case is not None)]
    return tuple({case.key: case for case in every}.values())


def list_validation_memory_bound() -> tuple[BenchCase, ...]:
    """Return sizes that no bench measures, to test what was learnt from one."""
    return tuple(_between(one, sizes) for one in KERNELS for sizes in one.gpu_sizes[:2])


def _between(kernel: BenchKernel, sizes: Sizes) -> BenchCase:
    """Return a case with five eighths of the tokens or parameters."""
    return kernel.build_case(
        {
            name: value * 5 // 8 if name in _COUNTS and isinstance(value, int) else value
            for name, value in sizes.items()
        }
    )


def prepare_memory_bound(case: BenchCase, place: BenchTarget) -> TimedWork | None:
    """Make a kernel's inputs, several sets of them where they would stay in the cache."""
    import torch

    kernel = _BY_NAME[case.text("kernel")]
    if kernel.needs_fp8 and not _knows_eight_bits(place):
        return None
    draw = TensorFactory(place.device, torch.bfloat16 if place.on_gpu else torch.float32)
    moved = kernel.count_bytes(case, draw.dtype.itemsize)
    calls = tuple(kernel.make(case, draw) for _ in range(count_input_sets(moved)))
    return TimedWork(calls, None, moved)


def _knows_eight_bits(place: BenchTarget) -> bool:
    import torch

    return place.on_gpu and torch.cuda.get_device_capability(place.device) >= (8, 9)


WARMUP_S = 0.1
"""How long products run before a sample: less than before products, as a lower clock hardly slows
what waits for memory."""
MEMORY_BOUND_FAMILY = BenchFamily(
    "memory_bound",
    "work bound by memory",
    list_memory_bound_cases,
    prepare_memory_bound,
    under_load=True,
    warmup_s=WARMUP_S,
    typical_s={"quick": 9.0, "full": 32.0},
)
