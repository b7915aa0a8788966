"""Time fp8 products of few rows as our engine makes them, with scales by row; write them as JSON.

    python -m validation.serving.measure_fp8 OUT.json            (about 20 seconds of a GPU)

For each shape and number of rows: rounding the input and multiplying, rounding alone, the same
product with one scale for each operand, and the product in bfloat16. Weights of several layers are
used in turn, so that no cache hides the memory, and replayed as a graph. `predict/cost/gemm.py`
says how wide the tiles of such products are taken to be where rows are few: this judges it.
Without a GPU the same runs with small sizes, which tells that it runs.
"""

# torch ships few types, and a lambda that binds a loop variable has none.
# mypy: disable-error-code="misc, no-untyped-call, no-any-return"

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.run.kernels.fp8.quantization import Fp8Matrix, quantize_rowwise, quantize_tensorwise
from meshwright.run.kernels.fp8.scaled_mm import scaled_mm

SHAPES = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (7168, 5120), (5120, 17408))
"""Outputs and inputs: the products of Llama 3.1 8B, and two of Qwen3 14B."""
ROWS = (1, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024)
SMALL = ((64, 32), (32, 128))
CACHE_BYTES = 256e6
"""Weights that are read before one is read again."""
TIMES = 7


def measure(
    shapes: tuple[tuple[int, int], ...], rows: tuple[int, ...]
) -> Iterator[dict[str, float]]:
    """Yield a row of seconds for each shape and number of rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for outputs, inputs in shapes:
        layers = max(2, int(CACHE_BYTES / outputs / inputs)) if device == "cuda" else 2
        wide = [
            torch.randn(outputs, inputs, device=device, dtype=torch.bfloat16) / inputs**0.5
            for _ in range(layers)
        ]
        by_row = [quantize_rowwise(weight).direct for weight in wide]
        by_tensor = [quantize_tensorwise(weight).direct for weight in wide]
        for number in rows:
            x = torch.randn(number, inputs, device=device, dtype=torch.bfloat16)
            x_row, x_tensor = quantize_rowwise(x).direct, quantize_tensorwise(x).direct
            yield {
                "m": number, "n": outputs, "k": inputs,
                "engine_s": _seconds(lambda w, x=x: _times(quantize_rowwise(x).direct, w), by_row),
                "cast_s": _seconds(lambda _, x=x: quantize_rowwise(x).direct.data, by_row),
                "rowwise_fast_s": _seconds(lambda w, x=x_row: _times(x, w), by_row),
                "tensorwise_fast_s": _seconds(lambda w, x=x_tensor: _times(x, w), by_tensor),
                "bf16_s": _seconds(lambda w, x=x: x @ w.t(), wide),
            }  # fmt: skip


def _times(x: Fp8Matrix, weight: Fp8Matrix) -> Tensor:
    return scaled_mm(x, weight, dtype=torch.bfloat16, fast_accum=True)


def _seconds(call: Callable[[Any], Tensor], weights: Sequence[Any]) -> float:
    """Return the time of one call, the middle of several passes over all weights."""
    for weight in weights[:2]:
        call(weight)
    if not torch.cuda.is_available():
        start = time.perf_counter()
        for weight in weights:
            call(weight)
        return (time.perf_counter() - start) / len(weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            call(weight)
    taken = []
    for _ in range(TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3 / len(weights))
    return statistics.median(taken[1:])


def main(given: list[str]) -> None:
    """Measure, and write what was found."""
    on_gpu = torch.cuda.is_available()
    found = list(measure(SHAPES, ROWS) if on_gpu else measure(SMALL, (1, 16)))
    about = {
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "torch": torch.__version__,
    }
    Path(given[0]).write_text(json.dumps({**about, "products": found}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
