"""Attention by the kernel that the trainer would choose, forward and backward.

Tensors lie as a layer's projections leave them: queries, keys and values side by side for each
token, which costs the backward pass several per cent against tensors of their own.
"""

from meshwright.observe.bench.bench_case import BenchCase
from meshwright.observe.bench.bench_family import BenchFamily, BenchTarget, Size
from meshwright.observe.bench.timing import Call, TimedWork, count_input_sets

HEADS = (
    (32, 8, 64),
    (32, 8, 128),
    (24, 8, 128),
    (16, 16, 128),
    (64, 8, 128),
    (16, 2, 256),
    (40, 40, 64),
)
"""Query heads, key heads and the width of one."""
LENGTHS = (1024, 2048, 4096, 8192, 16384)
TOKENS = 16384
"""Tokens of one call, unless a single sequence has more."""
OTHERS = (("full", 2048), ("full", 8192), ("window", 4096), ("window", 16384), ("packed", 8192),
          ("packed", 2048))  # fmt: skip
"""Masks other than the causal one, with lengths: none, a window, and documents side by side."""
WINDOW = 1024
DOCUMENTS = 4
"""How many of equal length a packed sequence holds; none sees another."""
HOST_TOKENS = 512
VALIDATION_SHAPES = (
    ((28, 4, 128), 3072), ((20, 4, 64), 6144), ((48, 8, 128), 1536), ((32, 8, 128), 12288),
    ((8, 8, 128), 6144), ((16, 4, 64), 3072),
)  # fmt: skip


def list_attention_cases(size: Size, on_gpu: bool) -> tuple[BenchCase, ...]:
    """Return head shapes by length under a causal mask, and a few under others."""
    if not on_gpu:
        return tuple(
            _case(part, 1, (4, 2, 64), length, "causal")
            for length in (128, HOST_TOKENS)
            for part in ("forward", "backward")
        )
    heads = HEADS if size == "full" else HEADS[1:2]
    lengths = LENGTHS if size == "full" else LENGTHS[1:4:2]
    found = [(shape, length, "causal") for length in lengths for shape in heads]
    if size == "full":
        found += [(shape, length, mask) for mask, length in OTHERS for shape in HEADS[:2]]
    return _cases(found)


def list_validation_attention() -> tuple[BenchCase, ...]:
    """Return shapes that no bench measures, to test what was learnt from one."""
    return _cases([(shape, length, "causal") for shape, length in VALIDATION_SHAPES])


def _cases(found: list[tuple[tuple[int, int, int], int, str]]) -> tuple[BenchCase, ...]:
    return tuple(
        _case(part, max(1, TOKENS // length), shape, length, mask)
        for shape, length, mask in found
        for part in ("forward", "backward")
    )


def _case(part: str, batch: int, heads: tuple[int, int, int], length: int, mask: str) -> BenchCase:
    sizes: dict[str, int | float | str] = {
        "batch": batch,
        "heads": heads[0],
        "kv_heads": heads[1],
        "head_dim": heads[2],
        "length": length,
        "mask": mask,
    }
    return BenchCase(family="attention", name=part, sizes=sizes)


def prepare_attention(case: BenchCase, place: BenchTarget) -> TimedWork | None:
    """Make the projections' output and cut it as a layer does."""
    from meshwright.predict.cost.attention import AttentionMask, attention_flops

    batch, heads, kv_heads, width, length = (
        case.size(name) for name in ("batch", "heads", "kv_heads", "head_dim", "length")
    )
    pieces = DOCUMENTS if case.text("mask") == "packed" else 1
    mask: AttentionMask = "full" if case.text("mask") == "full" else "causal"
    backward = case.name == "backward"
    flops = attention_flops(
        batch=batch * pieces, heads=heads, head_dim=width, seq=length // pieces,
        window=_window(case), mask=mask, part="backward" if backward else "forward",
    )  # fmt: skip
    each_bytes = 2 if place.on_gpu else 4
    moved = each_bytes * batch * length * width * 2 * (heads + kv_heads) * (1 + backward)
    calls = tuple(_call(case, place) for _ in range(count_input_sets(moved)))
    return TimedWork(calls, flops, float(moved))


def _window(case: BenchCase) -> int | None:
    return WINDOW if case.text("mask") == "window" else None


def _call(case: BenchCase, place: BenchTarget) -> Call:
    import torch

    from meshwright.run.kernels.attention.sdpa import PackedSequences, attention

    batch, heads, kv_heads, width, length = (
        case.size(name) for name in ("batch", "heads", "kv_heads", "head_dim", "length")
    )
    window, causal = _window(case), case.text("mask") != "full"
    documents = None
    if case.text("mask") == "packed":
        lengths = [[length // DOCUMENTS] * DOCUMENTS] * batch
        documents = PackedSequences.from_lengths(lengths, place.device)
    format_ = torch.bfloat16 if place.on_gpu else torch.float32
    shape = (batch, length, heads + 2 * kv_heads, width)
    packed = torch.randn(shape, device=place.device).to(format_)
    parts = torch.split(packed, [heads, kv_heads, kv_heads], dim=2)
    # A step's forward writes down what its backward needs.
    q, k, v = (each.detach().requires_grad_() for each in parts)

    def forward() -> torch.Tensor:
        return attention(q, k, v, causal=causal, window=window, documents=documents)

    if case.name == "forward":
        return forward
    out = forward()
    given = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), given, retain_graph=True)


ATTENTION_FAMILY = BenchFamily(
    "attention", "attention", list_attention_cases, prepare_attention, under_load=True,
    typical_s={"quick": 5.0, "full": 55.0},
)  # fmt: skip
