"""Attention by the kernel that the trainer would choose, forward and backward.

Tensors lie as a layer's projections leave them: queries, keys and values side by side for each
token, which costs the backward pass several per cent against tensors of their own.
"""

from collections.abc import Callable

from meshwright.observe.bench.case import Case
from meshwright.observe.bench.family import Family, Place, Size
from meshwright.observe.bench.timing import Work

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
WINDOW = 1024
HOST_TOKENS = 512


def cases(size: Size, on_gpu: bool) -> tuple[Case, ...]:
    """Return head shapes by length under a causal mask, and a few under none and in a window."""
    if not on_gpu:
        return tuple(
            _case(part, 1, (4, 2, 64), length, "causal")
            for length in (128, HOST_TOKENS)
            for part in ("forward", "backward")
        )
    heads = HEADS if size == "full" else HEADS[:2]
    lengths = LENGTHS if size == "full" else LENGTHS[1:4:2]
    found = [(shape, length, "causal") for length in lengths for shape in heads]
    if size == "full":
        found += [(shape, length, "full") for shape in HEADS[:2] for length in (2048, 8192)]
        found += [(shape, 8192, "window") for shape in HEADS[:2]]
    return tuple(
        _case(part, max(1, TOKENS // length), shape, length, mask)
        for shape, length, mask in found
        for part in ("forward", "backward")
    )


def _case(part: str, batch: int, heads: tuple[int, int, int], length: int, mask: str) -> Case:
    sizes: dict[str, int | float | str] = {
        "batch": batch,
        "heads": heads[0],
        "kv_heads": heads[1],
        "head_dim": heads[2],
        "length": length,
        "mask": mask,
    }
    return Case(family="attention", name=part, sizes=sizes)


def work(case: Case, place: Place) -> Work | None:
    """Make the projections' output and cut it as a layer does."""
    import torch

    from meshwright.predict.cost.attention import attention_flops
    from meshwright.run.kernels.attention import attention

    batch, heads, kv_heads, width, length = (
        case.size(name) for name in ("batch", "heads", "kv_heads", "head_dim", "length")
    )
    window = WINDOW if case.word("mask") == "window" else None
    causal = case.word("mask") != "full"
    format_ = torch.bfloat16 if place.on_gpu else torch.float32
    packed = torch.randn(batch, length, heads + 2 * kv_heads, width, device=place.device).to(
        format_
    )
    backward = case.name == "backward"
    packed.requires_grad_(backward)
    q, k, v = torch.split(packed, [heads, kv_heads, kv_heads], dim=2)

    def forward() -> torch.Tensor:
        return attention(q, k, v, causal=causal, window=window)

    call: Callable[[], object] = forward
    if backward:
        leaves = [each.detach().requires_grad_() for each in (q, k, v)]
        out = attention(*leaves, causal=causal, window=window)
        grad = torch.randn_like(out)
        call = lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True)  # noqa: E731
    flops = attention_flops(
        batch=batch, heads=heads, head_dim=width, seq=length, window=window,
        mask="causal" if causal else "full", part="backward" if backward else "forward",
    )  # fmt: skip
    moved = packed.element_size() * batch * length * width * 2 * (heads + kv_heads)
    return Work((call,), flops, float(2 * moved if backward else moved))


ATTENTION = Family("attention", "attention", cases, work, loaded=True)
