"""Matrix products as the trainer runs them: dense in every precision, and grouped.

A dense case is one of a linear layer's three products (`run/kernels/gemm/gemm.py`): m tokens, n
outputs, k inputs. Which of cuBLASLt's algorithms runs is chosen as in training. Products of eight
bits take operands that are quantised already: casts are cases of `memory_bound`.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter

from meshwright.observe.bench.bench_case import BenchCase
from meshwright.observe.bench.bench_family import BenchFamily, BenchTarget, Size
from meshwright.observe.bench.kernels.gemm_shapes import (
    BenchGemmShape,
    SizeRange,
    iter_cube_points,
    sample_gemm_shapes,
)
from meshwright.observe.bench.timing import TimedWork, count_input_sets

_PASS_METHODS = {"forward": "forward", "input_gradient": "dgrad", "weight_gradient": "wgrad"}
GEMM_PASSES = tuple(_PASS_METHODS)
NUM_CASES: dict[Size, dict[str, int]] = {
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
GROUPED_GEMM: dict[Size, int] = {"full": 36, "quick": 3}
EXPERTS, ROUTED = SizeRange(8, 256, 8), SizeRange(4096, 131072, 256)
EXPERT_WIDTHS = SizeRange(512, 8192, 128)


def list_gemm_cases(size: Size, on_gpu: bool) -> tuple[BenchCase, ...]:
    """Return what to measure: the three products over evenly spread shapes, some large ones first.

    Precisions and grouped products come mixed in proportion, beginning with one of each, so that a
    bench whose time is up has a part of all.
    """
    numbers = NUM_CASES[size] if on_gpu else ON_HOST[size]
    shapes = _large_first(sample_gemm_shapes(max(numbers.values())))
    if not on_gpu:
        shapes = tuple((place, _shrunk(shape)) for place, shape in shapes)
    found = [
        [_case(precision, choose_gemm_pass(place), shape) for place, shape in shapes[:number]]
        for precision, number in numbers.items()
    ]
    if on_gpu:
        found.append(_grouped_cases(GROUPED_GEMM[size]))
    placed = [(place / len(some), case) for some in found for place, case in enumerate(some)]
    return tuple(case for _, case in sorted(placed, key=itemgetter(0)))


def list_validation_gemms(
    number: int, precision: str = "bf16", *, size: Size = "full"
) -> tuple[BenchCase, ...]:
    """Return products that no bench of a size measures, to test what was learnt from one.

    `grouped` is a precision here as well.
    """
    if precision == "grouped":
        return tuple(_grouped_cases(GROUPED_GEMM[size] + number)[GROUPED_GEMM[size] :])
    after = max(len(GEMM_PASSES), NUM_CASES[size].get(precision, 0))
    shapes = enumerate(sample_gemm_shapes(number, after=after), start=after)
    return tuple(_case(precision, choose_gemm_pass(place), shape) for place, shape in shapes)


def choose_gemm_pass(place: int) -> str:
    """Return which of the three products has the shape at a place of the sequence.

    Taking them in turn would give each its own stretch of widths: three steps of the sequence come
    back to nearly the same width. Multiples of the golden ratio go in step with none of its sides.
    """
    return GEMM_PASSES[int(3 * ((place + 0.5) * GOLDEN % 1.0))]


def _large_first(shapes: Sequence[BenchGemmShape]) -> tuple[tuple[int, BenchGemmShape], ...]:
    """Return shapes with their places, beginning with some large ones.

    Few rows of a precision are worth little where launching takes most of their time.
    """
    placed = list(enumerate(shapes))
    first = [one for one in placed if one[1].flops >= LARGE_FLOPS][:LARGE]
    return (*first, *(one for one in placed if one not in first))


def _case(precision: str, part: str, shape: BenchGemmShape) -> BenchCase:
    if precision == "fp8-blockwise":
        shape = BenchGemmShape(*(-(-side // BLOCK) * BLOCK for side in shape))
    sizes: dict[str, int | float | str] = {"m": shape.m, "n": shape.n, "k": shape.k}
    return BenchCase(family="gemm", name=part, sizes={**sizes, "precision": precision})


def _shrunk(shape: BenchGemmShape) -> BenchGemmShape:
    return BenchGemmShape(*(max(64, side // HOST_SHRINKS // 16 * 16) for side in shape))


def _grouped_cases(number: int) -> list[BenchCase]:
    found = list[BenchCase]()
    for first, second, third in iter_cube_points():
        if len(found) == number:
            return found
        experts = EXPERTS.interpolate(first)
        tokens = -(-ROUTED.interpolate(second) // experts // 8) * 8
        sizes: dict[str, int | float | str] = {
            "experts": experts,
            "tokens": tokens,
            "n": EXPERT_WIDTHS.interpolate(third),
            "k": EXPERT_WIDTHS.interpolate((first + third) % 1.0),
        }
        found.append(
            BenchCase(family="gemm", name=f"grouped_{choose_gemm_pass(len(found))}", sizes=sizes)
        )
    raise AssertionError("points never end")


def prepare_gemm(case: BenchCase, place: BenchTarget) -> TimedWork | None:
    """Make a product's operands, several sets of them where they would stay in the cache."""
    if case.name.startswith("grouped_"):
        return _grouped(case, place)
    m, n, k = (case.size(side) for side in "mnk")
    precision = case.text("precision")
    make = _low_call if precision.startswith("fp8") else _call
    each_bytes = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2}.get(precision, 1)
    moved = each_bytes * (m * k + n * k + m * n)
    calls = [make(case, place, m, n, k) for _ in range(count_input_sets(moved))]
    if None in calls:
        return None
    return TimedWork(
        tuple(call for call in calls if call), BenchGemmShape(m, n, k).flops, float(moved)
    )


def _operands(part: str, m: int, n: int, k: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the shapes of the two matrices that a product reads."""
    return {
        "forward": ((m, k), (n, k)),
        "input_gradient": ((m, n), (n, k)),
        "weight_gradient": ((m, n), (m, k)),
    }[part]


def _call(case: BenchCase, place: BenchTarget, m: int, n: int, k: int) -> Callable[[], object]:
    import torch

    from meshwright.run.kernels.gemm.gemm import TORCH_GEMM, select_gemm_backend

    precision = case.text("precision")
    formats = {"bf16": torch.bfloat16, "fp16": torch.float16}
    first, second = (
        torch.randn(shape, device=place.device).to(formats.get(precision, torch.float32))
        for shape in _operands(case.name, m, n, k)
    )
    products = select_gemm_backend(place.device) if precision == "bf16" else TORCH_GEMM
    product = getattr(products, _PASS_METHODS[case.name])

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


def _low_call(
    case: BenchCase, place: BenchTarget, m: int, n: int, k: int
) -> Callable[[], object] | None:
    """Return a product of eight bits, each operand summed over its last axis, as cuBLAS wants."""
    import torch

    from meshwright.run.kernels.fp8 import quantization
    from meshwright.run.kernels.fp8.scaled_mm import scaled_mm
    from meshwright.run.nn.linear.fp8_linear import RECIPES

    if not place.on_gpu or torch.cuda.get_device_capability(place.device) < (8, 9):
        return None
    recipe = RECIPES[case.text("precision")]
    inner = {"forward": k, "input_gradient": n, "weight_gradient": m}[case.name]
    rows = {"forward": (m, n), "input_gradient": (m, k), "weight_gradient": (n, k)}[case.name]
    if any(side % recipe.alignment for side in (inner, *rows)):
        return None
    # The first operand is a gradient backward; blocks of a weight are square, others are lines.
    formats = (
        quantization.E4M3 if case.name == "forward" else recipe.gradient_dtype,
        quantization.E4M3,
    )
    lines: tuple[quantization.BlockScaling, quantization.BlockScaling] = ("1x128", "1x128")
    blocks = lines if case.name == "weight_gradient" else (lines[0], "128x128")
    operands = []
    for row, dtype, block in zip(rows, formats, blocks, strict=True):
        x = torch.randn(row, inner, device=place.device).bfloat16()
        match recipe.scaling:
            case "tensorwise":
                operands.append(quantization.quantize_tensorwise(x, dtype=dtype).direct)
            case "rowwise":
                operands.append(quantization.quantize_rowwise(x, dtype=dtype).direct)
            case "blockwise":
                operands.append(quantization.quantize_blockwise(x, block, dtype=dtype).direct)
    first, second = operands
    fast = _PASS_METHODS[case.name] in recipe.fast_accum_gemms
    return lambda: scaled_mm(first, second, dtype=torch.bfloat16, fast_accum=fast)


def _grouped(case: BenchCase, place: BenchTarget) -> TimedWork | None:
    if not place.on_gpu:
        return None
    experts, tokens, n, k = (case.size(name) for name in ("experts", "tokens", "n", "k"))
    rows = experts * tokens
    moved = 2.0 * (rows * (n + k) + experts * n * k)
    calls = tuple(_grouped_call(case, place) for _ in range(count_input_sets(moved)))
    return TimedWork(calls, 2.0 * rows * n * k, moved)


def _grouped_call(case: BenchCase, place: BenchTarget) -> Callable[[], object]:
    import torch

    from meshwright.run.kernels.moe import grouped_gemm

    experts, tokens, n, k = (case.size(name) for name in ("experts", "tokens", "n", "k"))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=place.device).bfloat16()

    x, dy, weight = draw(experts * tokens, k), draw(experts * tokens, n), draw(experts, n, k)
    ends = torch.arange(1, experts + 1, device=place.device, dtype=torch.int32) * tokens
    product_type = Callable[[grouped_gemm.GroupedGemmKernel], object]
    products: dict[str, tuple[grouped_gemm.GroupedGemmKind, product_type]] = {
        "forward": ("forward", lambda by: grouped_gemm.grouped_forward(by, x, weight, ends)),
        "input_gradient": (
            "dgrad", lambda by: grouped_gemm.grouped_dgrad(by, dy, weight, ends)
        ),
        "weight_gradient": ("wgrad", lambda by: grouped_gemm.grouped_wgrad(by, dy, x, ends)),
    }  # fmt: skip
    name, product = products[case.name.removeprefix("grouped_")]
    kernel = grouped_gemm.resolve_grouped_gemm_kernel(name, "auto", x, weight)
    return lambda: product(kernel)


GEMM_FAMILY = BenchFamily(
    "gemm", "matrix products", list_gemm_cases, prepare_gemm, under_load=True,
    typical_s={"quick": 16.0, "full": 180.0},
)  # fmt: skip
