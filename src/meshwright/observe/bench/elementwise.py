"""Work bound by memory: every class that `predict/cost` has a share of the bandwidth for.

The trainer's own kernels run, as a step calls them, on several sets of inputs in turn where one
would stay in the cache. A case is named for its class and says which kernel it is.
"""

from itertools import zip_longest

from meshwright.observe.bench.case import Case
from meshwright.observe.bench.family import Family, Place, Size
from meshwright.observe.bench.kernel import Kernel, Sizes, Tensors
from meshwright.observe.bench.layer_kernels import LAYER_KERNELS
from meshwright.observe.bench.step_kernels import STEP_KERNELS
from meshwright.observe.bench.timing import Work, sets_of_inputs

KERNELS = (*LAYER_KERNELS, *STEP_KERNELS)
_BY_NAME = {kernel.name: kernel for kernel in KERNELS}
_COUNTS = ("tokens", "parameters")
"""Sizes that a held-out case differs in."""


def cases(size: Size, on_gpu: bool) -> tuple[Case, ...]:
    """Return one size of every kernel, then in a full bench the second of each, and so on."""
    if not on_gpu:
        return tuple(one.case(one.host) for one in KERNELS if not one.eight_bits)
    first = [one.case(one.sizes[0]) for one in KERNELS if one.quick]
    if size == "quick":
        return tuple(first)
    rounds = zip_longest(*([one.case(sizes) for sizes in one.sizes] for one in KERNELS))
    every = [*first, *(case for each in rounds for case in each if case is not None)]
    return tuple({case.key: case for case in every}.values())


def held_out() -> tuple[Case, ...]:
    """Return sizes that no bench measures, to test what was learnt from one."""
    return tuple(_between(one, sizes) for one in KERNELS for sizes in one.sizes[:2])


def _between(kernel: Kernel, sizes: Sizes) -> Case:
    """Return a case with five eighths of the tokens or parameters."""
    return kernel.case(
        {
            name: value * 5 // 8 if name in _COUNTS and isinstance(value, int) else value
            for name, value in sizes.items()
        }
    )


def work(case: Case, place: Place) -> Work | None:
    """Make a kernel's inputs, several sets of them where they would stay in the cache."""
    import torch

    kernel = _BY_NAME[case.word("kernel")]
    if kernel.eight_bits and not _knows_eight_bits(place):
        return None
    draw = Tensors(place.device, torch.bfloat16 if place.on_gpu else torch.float32)
    moved = kernel.moved(case, draw.dtype.itemsize)
    calls = tuple(kernel.make(case, draw) for _ in range(sets_of_inputs(moved)))
    return Work(calls, None, moved)


def _knows_eight_bits(place: Place) -> bool:
    import torch

    return place.on_gpu and torch.cuda.get_device_capability(place.device) >= (8, 9)


HEAT_S = 0.1
"""How long products run before a sample: less than before products, as a lower clock hardly slows
what waits for memory."""
ELEMENTWISE = Family(
    "elementwise", "work bound by memory", cases, work, loaded=True, heat_s=HEAT_S,
    usual_s={"quick": 9.0, "full": 32.0},
)  # fmt: skip
