"""Matrix products as the trainer runs them: dense in every precision, and grouped.

A dense case is one of a linear layer's three products (`run/kernels/products.py`): m tokens, n
outputs, k inputs. Which of cuBLASLt's algorithms runs is chosen as in training. Products of eight
bits take operands that are quantised already: casts are cases of `elementwise`.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter

from meshwright.observe.bench.case import Case
from meshwright.observe.bench.family import Family, Place, Size
from meshwright.observe.bench.shapes import Range, Shape, points, product_shapes
from meshwright.observe.bench.timing import Work, sets_of_inputs

PARTS = ("forward", "input_gradient", "weight_gradient")
NUMBERS: dict[Size, dict[str, int]] = {
    "full": {
        "bf16": 150,
        "fp8-tensorwise": 60,
        "fp8-rowwise": 48,
        "fp8-blockwise": 48,
        "fp16": 12,
        "tf32": 12,
    },
    "quick": {
        "bf16": 9,
        "fp8-tensorwise": 3,
        "fp8-rowwise": 3,
        "fp8-blockwise": 3,
        "fp16": 1,
        "tf32": 1,
    },
}
"""How many products of each precision are measured."""
ON_HOST: dict[Size, dict[str, int]] = {"full": {"fp32": 48, "bf16": 12}, "quick": {"fp32": 18}}
GOLDEN = (5**0.5 - 1) / 2
LARGE, LARGE_FLOPS = 9, 1e11
"""How many large products come first, and what is large."""
BLOCK = 128
"""Sides of products whose scales are of blocks are multiples of it."""
HOST_SHRINKS = 16
"""A processor gets products with so many times fewer rows and columns."""
GROUPED: dict[Size, int] = {"full": 36, "quick": 3}
EXPERTS, ROUTED = Range(8, 256, 8), Range(4096, 131072, 256)
EXPERT_WIDTHS = Range(512, 8192, 128)


def cases(size: Size, on_gpu: bool) -> tuple[Case, ...]:
    """Return what to measure: the three products over evenly spread shapes, some large ones first.

    Precisions and grouped products come mixed in proportion, beginning with one of each, so that a
    bench whose time is up has a part of all.
    """
    numbers = NUMBERS[size] if on_gpu else ON_HOST[size]
    shapes = _large_first(product_shapes(max(numbers.values())))
    if not on_gpu:
        shapes = tuple((place, _shrunk(shape)) for place, shape in shapes)
    found = [
        [_case(precision, part_at(place), shape) for place, shape in shapes[:number]]
        for precision, number in numbers.items()
    ]
    if on_gpu:
        found.append(_grouped_cases(GROUPED[size]))
    placed = [(place / len(some), case) for some in found for place, case in enumerate(some)]
    return tuple(case for _, case in sorted(placed, key=itemgetter(0)))


def held_out(number: int, precision: str = "bf16", *, size: Size = "full") -> tuple[Case, ...]:
    """Return products that no bench of a size measures, to test what was learnt from one.

    `grouped` is a precision here as well.
    """
    if precision == "grouped":
        return tuple(_grouped_cases(GROUPED[size] + number)[GROUPED[size] :])
    after = max(len(PARTS), NUMBERS[size].get(precision, 0))
    shapes = enumerate(product_shapes(number, after=after), start=after)
    return tuple(_case(precision, part_at(place), shape) for place, shape in shapes)


def part_at(place: int) -> str:
    """Return which of the three products has the shape at a place of the sequence.

    Taking them in turn would give each its own stretch of widths: three steps of the sequence come
    back to nearly the same width. Multiples of the golden ratio go in step with none of its sides.
    """
    return PARTS[int(3 * ((place + 0.5) * GOLDEN % 1.0))]


def _large_first(shapes: Sequence[Shape]) -> tuple[tuple[int, Shape], ...]:
    """Return shapes with their places, beginning with some large ones.

    Few rows of a precision are worth little where launching takes most of their time.
    """
    placed = list(enumerate(shapes))
    first = [one for one in placed if one[1].flops >= LARGE_FLOPS][:LARGE]
    return (*first, *(one for one in placed if one not in first))


def _case(precision: str, part: str, shape: Shape) -> Case:
    if precision == "fp8-blockwise":
        shape = Shape(*(-(-side // BLOCK) * BLOCK for side in shape))
    sizes: dict[str, int | float | str] = {"m": shape.m, "n": shape.n, "k": shape.k}
    return Case(family="products", name=part, sizes={**sizes, "precision": precision})


def _shrunk(shape: Shape) -> Shape:
    return Shape(*(max(64, side // HOST_SHRINKS // 16 * 16) for side in shape))


def _grouped_cases(number: int) -> list[Case]:
    found = list[Case]()
    for first, second, third in points():
        if len(found) == number:
            return found
        experts = EXPERTS.at(first)
        tokens = -(-ROUTED.at(second) // experts // 8) * 8
        sizes: dict[str, int | float | str] = {
            "experts": experts,
            "tokens": tokens,
            "n": EXPERT_WIDTHS.at(third),
            "k": EXPERT_WIDTHS.at((first + third) % 1.0),
        }
        found.append(Case(family="products", name=f"grouped_{part_at(len(found))}", sizes=sizes))
    raise AssertionError("points never end")


def work(case: Case, place: Place) -> Work | None:
    """Make a product's operands, several sets of them where they would stay in the cache."""
    if case.name.startswith("grouped_"):
        return _grouped(case, place)
    m, n, k = (case.size(side) for side in "mnk")
    precision = case.word("precision")
    make = _low_call if precision.startswith("fp8") else _call
    each_bytes = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}.get(precision, 1)
    moved = each_bytes * (m * k + n * k + m * n)
    calls = [make(case, place, m, n, k) for _ in range(sets_of_inputs(moved))]
    if None in calls:
        return None
    return Work(tuple(call for call in calls if call), Shape(m, n, k).flops, float(moved))


def _operands(part: str, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of the two matrices that a product reads."""
    return {
        "forward": ((m, k), (n, k)),
        "input_gradient": ((m, n), (n, k)),
        "weight_gradient": ((m, n), (m, k)),
    }[part]


def _call(case: Case, place: Place, m: int, n: int, k: int) -> Callable[[], object]:
    import torch

    from meshwright.run.kernels.products import TORCH, fastest_products

    precision = case.word("precision")
    formats = {"bf16": torch.bfloat16, "fp16": torch.float16}
    first, second = (
        torch.randn(shape, device=place.device).to(formats.get(precision, torch.float32))
        for shape in _operands(case.name, m, n, k)
    )
    products = fastest_products(place.device) if precision == "bf16" else TORCH
    product = getattr(products, case.name)

    def call() -> object:
        if precision != "tf32":
            return product(first, second)
        kept = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            return product(first, second)
        finally:
            torch.set_float32_matmul_precision(kept)

    return call


def _low_call(case: Case, place: Place, m: int, n: int, k: int) -> Callable[[], object] | None:
    """Return a product of eight bits, each operand summed over its last axis, as cuBLAS wants."""
    import torch

    from meshwright.run.kernels import quantize_fp8 as fp8
    from meshwright.run.kernels.multiply_fp8 import multiply_fp8
    from meshwright.run.nn.fp8_linear import RECIPES

    if not place.on_gpu or torch.cuda.get_device_capability(place.device) < (8, 9):
        return None
    recipe = RECIPES[case.word("precision")]
    inner = {"forward": k, "input_gradient": n, "weight_gradient": m}[case.name]
    rows = {"forward": (m, n), "input_gradient": (m, k), "weight_gradient": (n, k)}[case.name]
    if any(side % recipe.multiple for side in (inner, *rows)):
        return None
    # The first operand is a gradient backward; blocks of a weight are square, others are lines.
    formats = (fp8.E4M3 if case.name == "forward" else recipe.gradient_dtype, fp8.E4M3)
    lines: tuple[fp8.Block, fp8.Block] = ("1x128", "1x128")
    blocks = lines if case.name == "weight_gradient" else (lines[0], "128x128")
    operands = []
    for row, dtype, block in zip(rows, formats, blocks, strict=True):
        x = torch.randn(row, inner, device=place.device).bfloat16()
        match recipe.scaling:
            case "tensorwise":
                operands.append(fp8.quantize_tensorwise(x, dtype=dtype).direct)
            case "rowwise":
                operands.append(fp8.quantize_rowwise(x, dtype=dtype).direct)
            case "blockwise":
                operands.append(fp8.quantize_blockwise(x, block, dtype=dtype).direct)
    first, second = operands
    words = {"forward": "forward", "input_gradient": "dgrad", "weight_gradient": "wgrad"}
    fast = words[case.name] in recipe.fast
    return lambda: multiply_fp8(first, second, dtype=torch.bfloat16, fast=fast)


def _grouped(case: Case, place: Place) -> Work | None:
    if not place.on_gpu:
        return None
    experts, tokens, n, k = (case.size(name) for name in ("experts", "tokens", "n", "k"))
    rows = experts * tokens
    moved = 2.0 * (rows * (n + k) + experts * n * k)
    calls = tuple(_grouped_call(case, place) for _ in range(sets_of_inputs(moved)))
    return Work(calls, 2.0 * rows * n * k, moved)


def _grouped_call(case: Case, place: Place) -> Callable[[], object]:
    import torch

    from meshwright.run.kernels import grouped_matmul as grouped

    experts, tokens, n, k = (case.size(name) for name in ("experts", "tokens", "n", "k"))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=place.device).bfloat16()

    x, dy, weight = draw(experts * tokens, k), draw(experts * tokens, n), draw(experts, n, k)
    ends = torch.arange(1, experts + 1, device=place.device, dtype=torch.int32) * tokens
    products: dict[str, tuple[grouped.Product, Callable[[grouped.Kernel], object]]] = {
        "forward": ("forward", lambda by: grouped.forward_product(by, x, weight, ends)),
        "input_gradient": (
            "input gradient", lambda by: grouped.input_gradient(by, dy, weight, ends)
        ),
        "weight_gradient": ("weight gradient", lambda by: grouped.weight_gradient(by, dy, x, ends)),
    }  # fmt: skip
    name, product = products[case.name.removeprefix("grouped_")]
    kernel = grouped.kernel_for(name, "auto", x, weight)
    return lambda: product(kernel)


PRODUCTS = Family(
    "products", "matrix products", cases, work, loaded=True,
    usual_s={"quick": 16.0, "full": 180.0},
)  # fmt: skip
