"""How near experts' products come to one dense product, and token sorting to the copy bandwidth.

The shape is Qwen3-30B-A3B's: 2048 wide, 128 experts of 768, 8 of them for each token. A dense
product of as many operations, the same rows times one expert's weights, is the yardstick of each
product; torch's `copy_` that of the kernels that move rows. All are measured in the same run.
Operations and bytes are those of the floor: padding, and rows that are read twice, do not count.

    PYTHONPATH=src:. python3 -m benchmarks.grouped_matmul --out result.json
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import msgspec

from benchmarks.result import figure
from meshwright.errors import MissingDependency

if TYPE_CHECKING:
    from torch import Tensor

    from meshwright.run.kernels.moe.grouped_gemm import GroupedGemmKernel, GroupedGemmKind
    from meshwright.run.kernels.moe.grouped_gemm_kernel import GroupedGemmTiles

NAME = "grouped_matmul"
QUESTION = "How near do experts' grouped products come to the rate of one dense product?"

HIDDEN, WIDTH, EXPERTS, CHOICES = 2048, 768, 128, 8
TOKENS = (16384, 32768)
TARGET = ">= 70"
COPY_TARGET = ">= 85"
SKEW = 0.5
"""Standard deviation of the experts' own attraction in the uneven case, in nats."""
LARGEST_ERROR = 1.5
"""In roundings to bfloat16 of the largest result."""


class Shape(NamedTuple):
    """The weights of one product: [experts, fan_out, fan_in]."""

    name: str
    fan_out: int
    fan_in: int


SHAPES = (Shape("gate_up", 2 * WIDTH, HIDDEN), Shape("down", HIDDEN, WIDTH))
PRODUCTS: "tuple[GroupedGemmKind, ...]" = ("forward", "dgrad", "wgrad")
KERNELS: "tuple[GroupedGemmKernel, ...]" = ("library", "triton")

Figures = list[dict[str, object]]
Result = TypeVar("Result")


class Found(NamedTuple):
    """What was measured so far."""

    figures: Figures
    peers: Figures
    failures: list[str]


class Operands(NamedTuple):
    """The tensors of one layer's product; letters as in meshwright.run.kernels.moe.grouped_gemm."""

    x: "Tensor"
    weight: "Tensor"
    dy: "Tensor"
    ends: "Tensor"

    def run(self, product: "GroupedGemmKind", kernel: "GroupedGemmKernel") -> "Tensor":
        """Compute one of the three products."""
        from meshwright.run.kernels.moe import grouped_gemm

        if product == "forward":
            return grouped_gemm.grouped_forward(kernel, self.x, self.weight, self.ends)
        if product == "dgrad":
            return grouped_gemm.grouped_dgrad(kernel, self.dy, self.weight, self.ends)
        return grouped_gemm.grouped_wgrad(kernel, self.dy, self.x, self.ends)

    def run_tiled(self, product: "GroupedGemmKind", tiles: "GroupedGemmTiles") -> "Tensor":
        """Compute one of them with Triton, cut in a certain way."""
        from meshwright.run.kernels.moe import grouped_gemm_kernel

        if product == "forward":
            return grouped_gemm_kernel.launch_forward(self.x, self.weight, self.ends, tiles=tiles)
        if product == "dgrad":
            return grouped_gemm_kernel.launch_dgrad(self.dy, self.weight, self.ends, tiles)
        return grouped_gemm_kernel.launch_wgrad(self.dy, self.x, self.ends, tiles)

    def run_dense(self, product: "GroupedGemmKind") -> "Tensor":
        """Multiply all rows with the first expert's weights."""
        if product == "forward":
            return self.x @ self.weight[0].t()
        if product == "dgrad":
            return self.dy @ self.weight[0]
        return self.dy.t() @ self.x

    @property
    def operations(self) -> int:
        """Multiplications and additions of each product."""
        return 2 * self.x.shape[0] * self.weight[0].numel()


def measure(quick: bool) -> dict[str, object]:
    """Measure on the GPU; without one, `quick` shows that the kernels work."""
    import torch

    if torch.cuda.is_available():
        return _measure_gpu(TOKENS[:1] if quick else TOKENS)
    if not quick:
        raise MissingDependency(
            "this benchmark needs a CUDA GPU", "run it with --quick to see it work"
        )
    return _measure_interpreted()


def _measure_gpu(token_counts: tuple[int, ...]) -> dict[str, object]:
    import torch
    import triton

    found = Found([], [], [])
    _check_errors(found)
    for tokens in token_counts:
        for shape in SHAPES:
            _measure_products(found, tokens, shape, sweep=tokens == token_counts[0])
    _measure_skewed(found, token_counts[0])
    for tokens in token_counts:
        _measure_moves(found, tokens)
    _measure_layer(found, token_counts[0])
    failed = " ".join(found.failures) or "none"
    notes = (
        f"bfloat16; hidden {HIDDEN}, {EXPERTS} experts of {WIDTH}, {CHOICES} per token, chosen at "
        "random where not called uneven; shares are of a dense torch product with as many "
        "operations, and of copy_ of 4 GiB, in the same run. Medians of five groups of launches "
        "back to back. 'library' is torch's grouped_mm, 'chosen' what `choose` picks. "
        f"Failures: {failed}. torch {torch.__version__}, Triton {triton.__version__}."
    )
    return {"figures": found.figures, "peers": found.peers, "notes": notes}


def candidates() -> "tuple[GroupedGemmTiles, ...]":
    """Return the cuts that are worth a try on Hopper; the first is the one in use."""
    from meshwright.run.kernels.moe.grouped_gemm_kernel import (
        HALF_PRECISION_TILES,
        GroupedGemmTiles,
    )

    return (
        HALF_PRECISION_TILES,
        GroupedGemmTiles(256, 128, 64, warps=8, stages=3),
        GroupedGemmTiles(128, 128, 64, warps=8, stages=4),
        GroupedGemmTiles(128, 128, 64, warps=4, stages=2, programs_per_sm=2),
    )


def _cut(tiles: "GroupedGemmTiles") -> str:
    size = f"{tiles.rows}x{tiles.columns}x{tiles.depth}"
    return f"{size} {tiles.warps} warps {tiles.stages} stages {tiles.programs_per_sm} per SM"


def _measure_products(found: Found, tokens: int, shape: Shape, *, sweep: bool) -> None:
    from meshwright.run.kernels.moe.grouped_gemm import GroupedGemmCase, select_grouped_gemm_kernel

    given = _operands(tokens, shape)
    for product in PRODUCTS:
        name = f"{shape.name} {product}, {tokens // 1024}k tokens"
        dense_s = _median_s(partial(given.run_dense, product))
        rate = given.operations / dense_s / 1e12
        found.peers.append(figure(f"dense, {name}", rate, "TFLOP/s"))
        case = GroupedGemmCase(product, given.x.dtype, EXPERTS, shape.fan_in, shape.fan_out)
        picked = select_grouped_gemm_kernel(case._replace(capability=(9, 0))).kernel
        for kernel in KERNELS:
            chosen = kernel == picked
            label = f"{kernel}{' (chosen)' if chosen else ''}, {name}"
            run = partial(given.run, product, kernel)
            _add_share(found, label, run, dense_s, TARGET if chosen else "")
        for tiles in candidates()[1:] if sweep else ():
            label = f"triton {_cut(tiles)}: {name}"
            _add_share(found, label, partial(given.run_tiled, product, tiles), dense_s)


def _measure_skewed(found: Found, tokens: int) -> None:
    """Experts of very different loads, as a router without balancing makes them."""
    given = _operands(tokens, SHAPES[0], skew=SKEW)
    for product in PRODUCTS:
        dense_s = _median_s(partial(given.run_dense, product))
        for kernel in KERNELS:
            label = f"{kernel}, uneven gate_up {product}, {tokens // 1024}k tokens"
            _add_share(found, label, partial(given.run, product, kernel), dense_s)


def _add_share(
    found: Found, label: str, run: Callable[[], object], dense_s: float, target: str = ""
) -> None:
    seconds = _attempt(found, label, partial(_median_s, run))
    if seconds is not None:
        found.figures.append(figure(label, 100 * dense_s / seconds, "% of dense", target))


def _measure_moves(found: Found, tokens: int) -> None:
    """Kernels that move rows, in shares of what a copy reaches."""
    import torch

    from meshwright.run.kernels.moe.token_permutation import permute, sort_by_expert, unpermute

    copy_per_s = _copy_bytes_per_s()
    experts = _routes(tokens)
    order = sort_by_expert(experts, EXPERTS)
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16().requires_grad_()
    y = torch.randn(tokens * CHOICES, HIDDEN, device="cuda").bfloat16().requires_grad_()
    weights = torch.rand(tokens, CHOICES, device="cuda", requires_grad=True)
    row_bytes, copies = 2 * HIDDEN, tokens * CHOICES
    rows, out = permute(x, order), unpermute(y, order, weights)
    moves: dict[str, tuple[int, Callable[[], object]]] = {
        "dispatch forward": (tokens + copies, lambda: permute(x.detach(), order)),
        "dispatch backward": (tokens + copies, lambda: _grad(rows, (x,), y.detach())),
        "combine forward": (
            tokens + copies,
            lambda: unpermute(y.detach(), order, weights.detach()),
        ),
        "combine backward": (tokens + 2 * copies, lambda: _grad(out, (y, weights), x.detach())),
    }
    for name, (moved, run) in moves.items():
        share = 100 * moved * row_bytes / _median_s(run) / copy_per_s
        label = f"{name}, {tokens // 1024}k tokens"
        found.figures.append(figure(label, share, "% of copy_", COPY_TARGET))
    seconds = _median_s(lambda: sort_by_expert(experts, EXPERTS))
    found.figures.append(figure(f"sort by expert, {tokens // 1024}k tokens", seconds * 1e6, "µs"))


def _measure_layer(found: Found, tokens: int) -> None:
    """A whole layer of experts with its router, forward and backward."""
    import torch

    from meshwright.run.nn.moe.moe_layer import MoELayer
    from meshwright.spec.model import feedforward

    described = feedforward.MoESpec(count=EXPERTS, top_k=CHOICES, width=WIDTH)
    layer = MoELayer(described, HIDDEN, device="cuda", dtype=torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(1, tokens, HIDDEN, device="cuda").bfloat16().requires_grad_()
    slope = torch.randn_like(x)
    leaves = (x, *layer.parameters())
    seconds = _attempt(found, "layer", partial(_median_s, lambda: _grad(layer(x), leaves, slope)))
    if seconds is not None:
        operations = 18 * tokens * CHOICES * HIDDEN * WIDTH
        label = f"experts layer, forward and backward, {tokens // 1024}k tokens"
        found.figures.append(figure(label, seconds * 1e3, "ms"))
        found.figures.append(figure(label, operations / seconds / 1e12, "TFLOP/s"))


def _grad(out: "Tensor", leaves: "tuple[Tensor, ...]", slope: "Tensor") -> object:
    import torch

    return torch.autograd.grad(out, leaves, slope, retain_graph=True)


def _check_errors(found: Found) -> None:
    """Compare every kernel with float64, with groups that are uneven, tiny and empty."""
    import torch

    worst: dict[str, float] = {}
    sizes = (700, 0, 1, 333, 1500, 0, 129, 64, 0)
    for shape in (Shape("", 512, 384), Shape("", 200, 1000)):
        given = _made(torch.tensor(sizes, device="cuda"), shape)
        for product in PRODUCTS:
            exact = Operands(given.x.double(), given.weight.double(), given.dy.double(), given.ends)
            wanted = exact.run(product, "reference")
            ways = {"library": partial(given.run, product, "library")}
            for tiles in candidates():
                ways[f"triton {_cut(tiles)}"] = partial(given.run_tiled, product, tiles)
            for name, run in ways.items():
                got = _attempt(found, f"{name} {product} {shape.fan_out}x{shape.fan_in}", run)
                if got is not None:
                    off = ((got.double() - wanted).abs().max() / wanted.abs().max()).item()
                    worst[name] = max(worst.get(name, 0.0), off / torch.finfo(got.dtype).eps)
    for name, error in worst.items():
        target = f"<= {LARGEST_ERROR}"
        label = f"error of {name} against float64"
        found.figures.append(figure(label, error, "roundings", target))


def _operands(tokens: int, shape: Shape, skew: float = 0.0) -> Operands:
    import torch

    loads = torch.bincount(_routes(tokens, skew).flatten(), minlength=EXPERTS)
    return _made(loads, shape)


def _made(loads: "Tensor", shape: Shape) -> Operands:
    import torch

    torch.manual_seed(0)
    rows = int(loads.sum())
    x = torch.randn(rows, shape.fan_in, device="cuda").bfloat16()
    weight = torch.randn(len(loads), shape.fan_out, shape.fan_in, device="cuda").bfloat16()
    dy = torch.randn(rows, shape.fan_out, device="cuda").bfloat16()
    return Operands(x, weight, dy, loads.cumsum(0).int())


def _routes(tokens: int, skew: float = 0.0) -> "Tensor":
    import torch

    generator = torch.Generator(device="cuda").manual_seed(1)
    scores = torch.randn(tokens, EXPERTS, device="cuda", generator=generator)
    attraction = torch.randn(EXPERTS, device="cuda", generator=generator)
    return (scores + skew * attraction).topk(CHOICES).indices


def _attempt(found: Found, label: str, run: Callable[[], Result]) -> Result | None:
    """Run; where a kernel cannot be compiled or launched, note it and go on."""
    import torch
    from triton.runtime.errors import TritonError

    try:
        result = run()
        torch.cuda.synchronize()
    except (RuntimeError, TritonError) as problem:
        found.failures.append(f"{label}: {type(problem).__name__}: {str(problem)[:200]}.")
        return None
    return result


def _median_s(run: Callable[[], object]) -> float:
    """Seconds of one launch: the median of five groups, back to back."""
    run()
    once_s = _group_s(run, 2)
    repeats = int(min(20, max(3, 0.015 / once_s)))
    return statistics.median(_group_s(run, repeats) for _ in range(5))


def _group_s(run: Callable[[], object], repeats: int) -> float:
    import torch

    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


def _copy_bytes_per_s() -> float:
    import torch

    here = torch.empty(2**30, device="cuda").normal_()
    there = torch.empty_like(here)
    return 2 * here.numel() * here.element_size() / _median_s(lambda: there.copy_(here))


def _measure_interpreted() -> dict[str, object]:
    """Show that the kernels work without a GPU: no figure of this says anything about speed."""
    import os

    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from meshwright.run.kernels.moe.grouped_gemm_kernel import GroupedGemmTiles

    torch.manual_seed(0)
    small = GroupedGemmTiles(16, 16, 16, warps=4, stages=2)
    ends = torch.tensor([5, 5, 23], dtype=torch.int32)
    given = Operands(torch.randn(23, 24), torch.randn(3, 40, 24), torch.randn(23, 40), ends)
    worst = 0.0
    for product in PRODUCTS:
        off = given.run_tiled(product, small) - given.run(product, "reference")
        worst = max(worst, off.abs().max().item())
    if worst > 1e-4:
        raise AssertionError(f"Triton's products are off by {worst}")
    notes = "Triton's interpreter on the CPU: correctness only."
    return {"figures": [figure("largest difference from torch", worst, "")], "notes": notes}


def main() -> None:
    """Measure, print, and write what was measured as JSON."""
    parser = argparse.ArgumentParser(prog="benchmarks.grouped_matmul", description=QUESTION)
    parser.add_argument("--out", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    arguments = parser.parse_args()
    answer = measure(arguments.quick)
    text = msgspec.json.format(msgspec.json.encode(answer), indent=2)
    if arguments.out is not None:
        arguments.out.write_bytes(text + b"\n")
    print(text.decode())


if __name__ == "__main__":
    main()
