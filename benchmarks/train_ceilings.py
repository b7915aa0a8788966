"""What one GPU can do at best of what a training step asks: a copy, products, attention.

Every rate is the median over a quarter of a second of back-to-back launches on random data, so it
is what the chip sustains at its power limit. Prints one JSON object.

    python -m benchmarks.train_ceilings
"""

from collections.abc import Callable
from itertools import pairwise
from statistics import median

import msgspec
import torch

from meshwright.run.kernels.attention.sdpa import attention

SUSTAINED_MS = 250.0
PRODUCTS = {
    "8192³": (8192, 8192, 8192),
    "1b gate and up": (32768, 16384, 2048),
    "1b down": (32768, 2048, 8192),
    "8b gate and up": (16384, 28672, 4096),
    "8b down": (16384, 4096, 14336),
}
"""Tokens, outputs and inputs of some products."""


def ceilings() -> dict[str, float]:
    """Measure each ceiling: TB/s for the copy, TFLOP/s for the rest."""
    device = torch.device("cuda")
    found = {}
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied_ms = _time_ms(lambda: target.copy_(source))
    found["copy, read and written, TB/s"] = 2 * source.numel() / copied_ms / 1e9
    for name, shape in PRODUCTS.items():
        found |= _products(name, *shape, device)
    for batch, width in ((8, 64), (4, 128)):
        found |= _attention(batch, width, device)
    return {name: float(f"{value:.4g}") for name, value in found.items()}


def _products(
    name: str, rows: int, columns: int, inner: int, device: torch.device
) -> dict[str, float]:
    """Time one product in bf16 and, with a scale per row, in fp8."""
    x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    w = torch.randn(columns, inner, device=device, dtype=torch.bfloat16)
    flops = 2 * rows * columns * inner
    bf16_ms = _time_ms(lambda: x @ w.t())
    x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    scales = (torch.ones(rows, 1, device=device), torch.ones(1, columns, device=device))

    def narrow() -> torch.Tensor:
        return torch._scaled_mm(  # noqa: SLF001
            x8, w8.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return {
        f"bf16 product {name}, TFLOP/s": flops / bf16_ms / 1e9,
        f"fp8 product {name}, TFLOP/s": flops / _time_ms(narrow) / 1e9,
    }


def _attention(batch: int, width: int, device: torch.device) -> dict[str, float]:
    """Time causal attention of 32 query and 8 key heads over 4096 tokens."""
    heads, keys, length = 32, 8, 4096
    q, k, v = (
        torch.randn(batch, length, count, width, device=device, dtype=torch.bfloat16)
        .requires_grad_()
        for count in (heads, keys, keys)
    )  # fmt: skip
    out = attention(q, k, v)
    grad = torch.randn_like(out)
    flops = 2 * batch * heads * length**2 * width
    forward_ms = _time_ms(lambda: attention(q, k, v))
    backward_ms = _time_ms(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    return {
        f"attention forward, heads of {width}, TFLOP/s": flops / forward_ms / 1e9,
        f"attention backward, heads of {width}, TFLOP/s": 2 * flops / backward_ms / 1e9,
    }


def _time_ms(work: Callable[[], object]) -> float:
    """Return the median time of one call, after a warm-up."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    first, last = _event(), _event()
    first.record()
    work()
    last.record()
    last.synchronize()
    count = max(5, int(SUSTAINED_MS / max(first.elapsed_time(last), 1e-3)))
    marks = [_event() for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return float(median(a.elapsed_time(b) for a, b in pairwise(marks)))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    print(msgspec.json.encode(ceilings()).decode(), flush=True)
