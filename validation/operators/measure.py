"""Time the operations of a training step on one NVIDIA GPU and write them as JSON.

    python -m validation.operators.measure OUT.json

It needs PyTorch with CUDA and nothing of Meshwright. The serving tables that `fit.py` reads hold
no backward pass, no weight gradient and no elementwise work; this script measures those, in short
bursts on random data. It fits nothing: the constants that come of its figures are in
`src/meshwright/predict/cost/`.
"""

# torch ships few types, and a lambda that binds a loop variable has none.
# mypy: disable-error-code="misc, no-untyped-call, no-any-return"

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

Row = dict[str, Any]
BURST_S = 0.008
REST_S = 0.03
# (n, k) of real layers: Llama 3 8B, 70B on 8 ranks, 405B on 8 ranks, GPT 22B on 8 ranks, and a
# handful of small ones. Logits first.
WEIGHTS = (
    (128256, 4096), (16032, 16384), (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336),
    (1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584), (2304, 16384), (16384, 2048),
    (13312, 16384), (16384, 6656), (2304, 6144), (6144, 768), (3072, 6144), (2048, 2048),
    (8192, 2048), (2048, 8192), (1024, 1024), (4096, 1024), (1024, 4096),
)  # fmt: skip


def seconds(call: Callable[[], object], burst_s: float = BURST_S, rest_s: float = REST_S) -> float:
    """Return the mean time of one call inside a short burst, after warming up and a rest.

    The rest lets the chip cool: back-to-back bursts of large products run 15 % slower, which is
    the power limit and not the product (see `sustained`).
    """
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    once = max(time.perf_counter() - start, 5e-6)
    count = max(3, min(2000, int(burst_s / once)))
    time.sleep(rest_s)
    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / count


def graphed_seconds(call: Callable[[], object], inside: int = 0) -> float:
    """Return the time of one call replayed inside a CUDA graph, which hides the host."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
        side.synchronize()
        start = time.perf_counter()
        call()
        side.synchronize()
        once = time.perf_counter() - start
    torch.cuda.current_stream().wait_stream(side)
    count = inside or max(1, min(20, int(2e-3 / once)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            call()
    return seconds(graph.replay) / count


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return normal random data on the GPU: zeros would run 10 % faster, for want of power."""
    return torch.randn(*shape, device="cuda", dtype=torch.float32).to(dtype)


def products() -> Iterator[Row]:
    """Forward (TN), input gradient (NN) and weight gradient (NT, three ways to store it)."""
    for n, k in WEIGHTS:
        w = randn(n, k)
        for m in (1024, 4096, 16384):
            x, dy = randn(m, k), randn(m, n)
            row: Row = {"m": m, "n": n, "k": k}
            row["tn_s"] = graphed_seconds(lambda x=x, w=w: F.linear(x, w))
            row["nn_s"] = graphed_seconds(lambda dy=dy, w=w: dy @ w)
            row["nt_bf16_s"] = graphed_seconds(lambda x=x, dy=dy: dy.t() @ x)
            if n * k <= 2**28:
                grad = torch.zeros(n, k, device="cuda", dtype=torch.float32)
                row["nt_fp32_s"] = graphed_seconds(
                    lambda x=x, dy=dy: torch.mm(dy.t(), x, out_dtype=torch.float32)
                )
                row["nt_accumulate_s"] = graphed_seconds(
                    lambda x=x, dy=dy, grad=grad: torch.addmm(
                        grad, dy.t(), x, out_dtype=torch.float32, out=grad
                    )
                )
            yield row


def products_fp8() -> Iterator[Row]:
    """Products of 8-bit inputs, forward orientation: scaled per tensor, row and block."""
    e4m3 = torch.float8_e4m3fn
    one = torch.ones((), device="cuda")

    def product(a: Any, b: Any, scale_a: Any, scale_b: Any, fast: bool) -> Callable[[], object]:
        return lambda: torch._scaled_mm(  # noqa: SLF001
            a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    for n, k in WEIGHTS:
        w = randn(n, k).to(e4m3)
        for m in (1024, 4096, 16384):
            x = randn(m, k).to(e4m3)
            rows, columns = torch.ones(m, 1, device="cuda"), torch.ones(1, n, device="cuda")
            row: Row = {"m": m, "n": n, "k": k}
            row["tensorwise_fast_s"] = graphed_seconds(product(x, w, one, one, True))
            row["tensorwise_s"] = graphed_seconds(product(x, w, one, one, False))
            row["rowwise_fast_s"] = graphed_seconds(product(x, w, rows, columns, True))
            if n % 128 == 0 and k % 128 == 0:
                # Scales per 1 x 128 of the activations, per 128 x 128 of the weights.
                act = torch.ones(k // 128, m, device="cuda").t()
                blocks = torch.ones(k // 128, n // 128, device="cuda")
                try:
                    row["blockwise_s"] = graphed_seconds(product(x, w, act, blocks, False))
                except (RuntimeError, ValueError) as error:
                    row["blockwise_error"] = str(error).splitlines()[0][:120]
            yield row


def products_odd() -> Iterator[Row]:
    """Products with awkward sizes, and batches of small ones as unfused attention has them."""
    for m, n, k in (
        (4096, 4096, 4096), (4096, 4096, 4104), (4096, 4096, 4100), (4096, 4096, 4098),
        (4096, 4096, 4097), (4096, 50304, 4096), (4096, 50257, 4096), (4096, 4100, 4096),
        (4096, 4098, 4096), (4100, 4096, 4096), (8192, 8, 4096), (8192, 64, 4096),
        (8192, 128, 7168), (8192, 256, 7168), (8192, 576, 7168), (8192, 1536, 7168),
        (8192, 4096, 128), (8192, 4096, 256), (8192, 32768, 512),
    ):  # fmt: skip
        x, w = randn(m, k), randn(n, k)
        time_s = graphed_seconds(lambda x=x, w=w: F.linear(x, w))
        yield {"m": m, "n": n, "k": k, "batch": 1, "s": time_s}
    for batch, s, d in (
        (32, 2048, 64), (32, 2048, 80), (32, 2048, 96), (32, 2048, 108), (32, 2048, 112),
        (32, 2048, 128), (32, 2048, 160), (8, 2048, 128), (64, 4096, 128), (64, 1024, 64),
    ):  # fmt: skip
        q, k_, p = randn(batch, s, d), randn(batch, s, d), randn(batch, s, s)
        for name, m, n, k, call in (
            ("scores", s, s, d, lambda q=q, k_=k_: torch.bmm(q, k_.transpose(1, 2))),
            ("context", s, d, s, lambda p=p, k_=k_: torch.bmm(p, k_)),
            ("transposed", s, d, s, lambda p=p, k_=k_: torch.bmm(p.transpose(1, 2), k_)),
        ):
            time_s = graphed_seconds(call)
            yield {"op": name, "m": m, "n": n, "k": k, "batch": batch, "s": time_s}


def products_wide() -> Iterator[Row]:
    """The same products in tf32 and in plain fp32."""
    for size in (2048, 4096, 8192):
        a, b = randn(size, size, dtype=torch.float32), randn(size, size, dtype=torch.float32)
        row: Row = {"m": size, "n": size, "k": size}
        for name, allow in (("tf32_s", True), ("fp32_s", False)):
            torch.backends.cuda.matmul.allow_tf32 = allow
            row[name] = seconds(lambda a=a, b=b: a @ b)
        yield row


def attention() -> Iterator[Row]:
    """Flash-style attention forward and backward, by the two kernels PyTorch carries."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cases = [
        (max(1, tokens // s), h, g, d, dv, s, causal)
        for d, dv in ((128, 128), (64, 64), (96, 96), (192, 128))
        for h, g in (((32, 8), (8, 8), (4, 1)) if d == dv else ((128, 128), (16, 16)))
        for tokens, s in ((8192, 512), (8192, 1024), (8192, 2048), (8192, 4096), (8192, 8192),
                          (32768, 32768))
        for causal in (True, False)
        if not (d != dv and s > 8192) and (causal or s in (2048, 8192))
        and not (d == 96 and (h != 32 or s > 8192))
    ]  # fmt: skip
    for b, h, g, d, dv, s, causal in cases:
        q = randn(b, s, h, d).transpose(1, 2).requires_grad_()
        k = randn(b, s, g, d).transpose(1, 2).requires_grad_()
        v = randn(b, s, g, dv).transpose(1, 2).requires_grad_()
        grad = randn(b, s, h, dv).transpose(1, 2)
        row: Row = {"b": b, "h": h, "kv": g, "d": d, "dv": dv, "s": s, "causal": causal}
        for name, backend in (
            ("flash2", SDPBackend.FLASH_ATTENTION),
            ("cudnn", SDPBackend.CUDNN_ATTENTION),
        ):
            if name == "flash2" and d != dv:
                continue

            def forward(q: Any = q, k: Any = k, v: Any = v, c: bool = causal) -> torch.Tensor:
                return F.scaled_dot_product_attention(
                    q, k, v, is_causal=c, enable_gqa=q.shape[1] != k.shape[1]
                )

            def both(
                call: Callable[[], Any] = forward, i: Any = (q, k, v), g: Any = grad
            ) -> object:
                return torch.autograd.grad(call(), i, g)

            with sdpa_kernel([backend]):
                try:
                    row[f"{name}_forward_s"] = graphed_seconds(forward)
                    row[f"{name}_both_s"] = graphed_seconds(both)
                except RuntimeError as error:
                    row[f"{name}_error"] = str(error).splitlines()[0][:90]
                    torch.cuda.synchronize()
        yield row


def grouped() -> Iterator[Row]:
    """Experts' products as one grouped kernel: forward and both gradients."""
    product = torch._grouped_mm  # noqa: SLF001
    for experts, n, k in (
        (8, 14336, 4096), (8, 4096, 7168), (32, 4096, 7168), (32, 7168, 2048),
        (64, 1536, 2048), (16, 2816, 2048), (128, 1536, 2048),
    ):  # fmt: skip
        w = randn(experts, n, k)
        for per in (64, 128, 256, 512, 1024, 2048):
            m = per * experts
            x, dy = randn(m, k), randn(m, n)
            ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * per
            row: Row = {"experts": experts, "tokens": per, "n": n, "k": k}
            row["forward_s"] = graphed_seconds(
                lambda x=x, w=w, e=ends: product(x, w.transpose(1, 2), offs=e)
            )
            row["input_gradient_s"] = graphed_seconds(
                lambda dy=dy, w=w, e=ends: product(dy, w, offs=e)
            )
            row["weight_gradient_s"] = graphed_seconds(
                lambda x=x, dy=dy, e=ends: product(dy.t(), x, offs=e)
            )
            yield row


def elementwise() -> Iterator[Row]:
    """Work bound by memory; `bytes` is what must be read and written once."""
    for rows, width in ((8192, 4096), (8192, 16384), (2048, 4096), (1024, 1024)):
        x, y = randn(rows, width), randn(rows, width)
        weight = randn(width)
        size = x.numel() * 2
        order = torch.randperm(rows, device="cuda")
        calls: dict[str, tuple[float, Callable[[], object]]] = {
            "copy": (2 * size, lambda x=x, y=y: y.copy_(x)),
            "add": (3 * size, lambda x=x, y=y: torch.add(x, y)),
            "gelu": (2 * size, lambda x=x: F.gelu(x)),
            "layer_norm": (2 * size, lambda x=x, w=weight: F.layer_norm(x, w.shape, w, w)),
            "rms_norm": (2 * size, lambda x=x, w=weight: F.rms_norm(x, w.shape, w)),
            "softmax": (2 * size, lambda x=x: torch.softmax(x, -1)),
            "gather_rows": (2 * size, lambda x=x, o=order: x.index_select(0, o)),
            "scatter_add_rows": (
                3 * size,
                lambda x=x, y=y, o=order: y.index_add_(0, o, x),
            ),
            "cast_fp8": (1.5 * size, lambda x=x: x.to(torch.float8_e4m3fn)),
            "cast_fp32": (3 * size, lambda x=x: x.float()),
            "transpose": (2 * size, lambda x=x: x.t().contiguous()),
        }
        for name, (size_bytes, call) in calls.items():
            yield _graphed(name, rows, width, size_bytes, call)


def _graphed(
    name: str, rows: int, width: int, size_bytes: float, call: Callable[[], object]
) -> Row:
    row: Row = {"op": name, "rows": rows, "width": width, "bytes": size_bytes}
    try:
        row["s"] = graphed_seconds(call)
    except RuntimeError as error:
        row["error"] = str(error).splitlines()[0][:90]
        torch.cuda.synchronize()
    return row


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def _loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x.float(), target)


def _norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), w)


def _residual_norm(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x + r, (x.shape[-1],), w)


def _combine(x: torch.Tensor, index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x[index] * weight.unsqueeze(-1)).sum(1)


def _tensorwise(x: torch.Tensor) -> torch.Tensor:
    return (x.float() * (448.0 / x.abs().amax().float())).to(torch.float8_e4m3fn)


def _delayed(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x.float() * scale).to(torch.float8_e4m3fn), x.abs().amax()


def _blockwise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = x.float().view(x.shape[0], -1, 128)
    scale = 448.0 / blocks.abs().amax(-1, keepdim=True)
    return (blocks * scale).to(torch.float8_e4m3fn).view(x.shape), scale


def compiled() -> Iterator[Row]:
    """Fused elementwise work as a compiler writes it, forward and backward."""
    t, h = 8192, 4096
    x, w = randn(t, h), randn(h)
    index = torch.randint(t, (t, 8), device="cuda")
    cases: tuple[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...], float, float], ...] = (
        ("swiglu", _swiglu, (randn(t, 2 * 14336),), 1.5, 2.5),
        ("gelu", _gelu, (randn(t, 4 * h),), 2, 3),
        ("rotary", _rotary, (randn(t, 32, 128), randn(t, 1, 64), randn(t, 1, 64)), 2, 2),
        ("cross_entropy", _loss, (randn(4096, 128256), torch.randint(9, (4096,)).cuda()), 1, 2),
        ("cross_entropy_sharded", _loss, (randn(8192, 16032), torch.randint(9, (t,)).cuda()), 1, 2),
        ("norm", _norm, (x, w), 2, 3),
        ("residual_norm", _residual_norm, (x, randn(t, h), w), 3, 3),
        ("combine_top8", _combine, (x, index, randn(t, 8)), 9, 0),
        ("quantise_tensorwise", _tensorwise, (x,), 2.5, 0),
        ("quantise_delayed", _delayed, (x, torch.ones((), device="cuda")), 1.5, 0),
        ("quantise_blockwise", _blockwise, (x,), 1.5, 0),
    )
    for name, plain, inputs, moved, moved_back in cases:
        call = torch.compile(plain)
        size = inputs[0].numel() * 2
        forward_s = graphed_seconds(lambda c=call, i=inputs: c(*i))
        yield {"op": name, "bytes": moved * size, "s": forward_s}
        if moved_back:
            first = inputs[0].detach().requires_grad_()
            grad = torch.randn_like(call(first, *inputs[1:]))

            def both(c: Any = call, f: Any = first, r: Any = inputs[1:], g: Any = grad) -> object:
                return torch.autograd.grad(c(f, *r), f, g)

            both_s = graphed_seconds(both)
            yield {
                "op": f"{name}_backward",
                "bytes": moved_back * size,
                "s": both_s - forward_s,
            }


def optimizer() -> Iterator[Row]:
    """AdamW with fp32 weights, gradients and both moments: 28 bytes per parameter."""
    for count in (2**24, 2**28):
        weight = torch.zeros(count, device="cuda").requires_grad_()
        weight.grad = torch.randn(count, device="cuda")
        step = torch.optim.AdamW([weight], lr=1e-4, fused=True)
        yield {"op": "adamw_fused", "parameters": count, "s": seconds(step.step)}
        yield {
            "op": "gradient_norm",
            "parameters": count,
            "s": seconds(lambda w=weight: torch.linalg.vector_norm(w.grad)),
        }


def launches() -> Iterator[Row]:
    """What one tiny kernel costs on the host, and on the GPU inside a CUDA graph."""
    tiny = torch.ones(1024, device="cuda")
    w, x = randn(128, 128), randn(16, 128)
    for name, call in (
        ("add", lambda: tiny.add_(1.0)),
        ("linear", lambda: F.linear(x, w)),
    ):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(2000):
            call()
        host = (time.perf_counter() - start) / 2000
        torch.cuda.synchronize()
        yield {"op": name, "host_s": host, "graphed_s": graphed_seconds(call, 500)}


def layers() -> Iterator[Row]:
    """One dense decoder layer forward and backward in a CUDA graph: at once, and after 4 s."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for name, m, h, heads, kv, ffn in (
        ("llama3-8b", 8192, 4096, 32, 8, 14336),
        ("llama3-70b / 8", 8192, 8192, 8, 1, 3584),
        ("llama3-405b / 8", 8192, 16384, 16, 1, 6656),
    ):
        weights = [
            randn(n, k).mul_(k**-0.5).requires_grad_()
            for n, k in (
                ((heads + 2 * kv) * 128, h), (h, heads * 128), (2 * ffn, h), (h, ffn),
            )
        ]  # fmt: skip
        gain, x, grad = randn(h).requires_grad_(), randn(m, h).requires_grad_(), randn(m, h)

        def forward(
            x: Any = x, w: Any = weights, gain: Any = gain, heads: int = heads, kv: int = kv
        ) -> torch.Tensor:
            qkv = F.linear(F.rms_norm(x, (x.shape[-1],), gain), w[0])
            q, k, v = (
                y.view(1, x.shape[0], -1, 128).transpose(1, 2)
                for y in qkv.split((heads * 128, kv * 128, kv * 128), -1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + F.linear(mixed.transpose(1, 2).reshape(x.shape[0], -1), w[1])
            gate, up = F.linear(F.rms_norm(x, (x.shape[-1],), gain), w[2]).chunk(2, -1)
            return x + F.linear(F.silu(gate) * up, w[3])

        call = torch.compile(forward)

        def both(c: Any = call, i: Any = (x, gain, *weights), g: Any = grad) -> object:
            return torch.autograd.grad(c(), i, g)

        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            row: Row = {"layer": name, "m": m, "h": h, "heads": heads, "kv": kv, "ffn": ffn}
            row["forward_s"] = graphed_seconds(call)
            row["both_s"] = graphed_seconds(both)
            end = time.perf_counter() + 4.0
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                both()
            while time.perf_counter() < end:
                graph.replay()
                torch.cuda.synchronize()
            begin, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(100):
                graph.replay()
            stop.record()
            torch.cuda.synchronize()
            row["both_sustained_s"] = begin.elapsed_time(stop) / 1e5
            row |= _by_class(graph)
        yield row


def _by_class(graph: Any, replays: int = 20) -> dict[str, float]:
    """Return the time of products, attention and the rest in one replay of a loaded GPU."""
    for _ in range(50):
        graph.replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
    sums = {"products_sustained_s": 0.0, "attention_sustained_s": 0.0, "other_sustained_s": 0.0}
    for event in profile.key_averages():
        name = event.key.lower()
        kind = "other"
        if any(word in name for word in ("sdpa", "flash", "fmha", "attention", "cudnn")):
            kind = "attention"
        elif any(word in name for word in ("gemm", "nvjet", "cutlass", "cublas")):
            kind = "products"
        sums[f"{kind}_sustained_s"] += event.device_time_total * 1e-6 / replays
    return sums


def sustained() -> Iterator[Row]:
    """The same product in a cold burst and after seconds of full load."""
    for name, fill in (("random", randn), ("zeros", lambda *s: torch.zeros_like(randn(*s)))):
        a, b = fill(8192, 8192), fill(8192, 8192)
        time.sleep(1.0)
        cold = seconds(lambda a=a, b=b: a @ b)
        windows = []
        end = time.perf_counter() + 3.0
        while time.perf_counter() < end:
            windows.append(seconds(lambda a=a, b=b: a @ b, 0.1, 0.0))
        yield {
            "data": name,
            "burst_tflops": 2 * 8192**3 / cold / 1e12,
            "sustained_tflops": 2 * 8192**3 / statistics.median(windows[-8:]) / 1e12,
        }


SECTIONS = (
    launches, products, attention, products_fp8, products_odd, grouped, elementwise, optimizer,
    products_wide, compiled, layers, sustained,
)  # fmt: skip


def main(path: str) -> None:
    """Run every section, writing the file again after each so that a stop loses little."""
    begin = time.perf_counter()
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
    }
    for section in SECTIONS:
        rows: list[Row] = []
        try:
            rows.extend(section())
        except (RuntimeError, TypeError, AttributeError, NotImplementedError) as error:
            rows.append({"error": f"{type(error).__name__}: {error}"[:400]})
        result[section.__name__] = rows
        Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        torch.cuda.empty_cache()
        sys.stderr.write(f"{time.perf_counter() - begin:6.1f} s  {section.__name__}: {rows[-1]}\n")


if __name__ == "__main__":
    main(sys.argv[1])
