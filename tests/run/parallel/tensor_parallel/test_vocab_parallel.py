"""The loss of ranks that hold some words each costs, and gives, what one device's does."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="runs gloo ranks")

import torch
from torch.utils.flop_counter import FlopCounterMode

from meshwright.run.kernels.loss.cross_entropy_kernel import CrossEntropyOptions
from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.kernels.loss.linear_cross_entropy import linear_cross_entropy
from meshwright.run.nn.sharding.shard_spec import split_evenly
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.tensor_parallel import vocab_parallel
from meshwright.run.parallel.tensor_parallel.vocab_parallel import VocabParallel
from meshwright.spec.layout import Layout

TOKENS, HIDDEN, WORDS = 24, 16, 61
RULE = CrossEntropyOptions(IGNORE_INDEX, None, None, 1e-3)
CASES = [(torch.float32, 1e-6, 1), (torch.float32, 1e-6, 3), (torch.bfloat16, 1e-2, 1)]
"""Formats, how far what comes of them may be off, and in how many chunks tokens go through."""


def drawn(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(2)
    x = torch.randn(1, TOKENS, HIDDEN, generator=made).to(dtype)
    labels = torch.randint(0, WORDS, (1, TOKENS), generator=made)
    labels[0, 3] = IGNORE_INDEX
    return x, torch.randn(WORDS, HIDDEN, generator=made).to(dtype), labels


def on_rank() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    mesh = Mesh(Layout(tp=2))
    return [compared(mesh, dtype, chunks) for dtype, _, chunks in CASES]


def compared(mesh: Mesh, dtype: torch.dtype, chunks: int) -> dict[str, Any]:
    """Return how far loss and gradients are from one device's, and what was multiplied."""
    words = VocabParallel(mesh["tp"], WORDS, sequence_parallel=False)
    x, weight, labels = drawn(dtype)
    held = split_evenly(WORDS, 2, mesh.rank)
    # One rank has a word less, and still the same chunks.
    vocab_parallel.MAX_CHUNK_BYTES = 4 * split_evenly(WORDS, 2, 0).size * TOKENS // chunks
    mine = weight[held.start : held.stop].clone().requires_grad_()
    here = x.clone().requires_grad_()
    with FlopCounterMode(display=False) as learning:
        sums = words.loss(here, labels, mine, None, RULE)
        (sums.loss_sum / TOKENS).backward()  # type: ignore[no-untyped-call]
    with FlopCounterMode(display=False) as looking, torch.no_grad():
        seen = words.loss(here, labels, mine, None, RULE)
    there, whole = x.clone().requires_grad_(), weight.clone().requires_grad_()
    alone = linear_cross_entropy(there[0], whole, labels[0], z_loss=RULE.z_loss)
    (alone.loss_sum / TOKENS).backward()  # type: ignore[no-untyped-call]
    assert mine.grad is not None
    assert here.grad is not None
    assert there.grad is not None
    assert whole.grad is not None
    product = 2 * TOKENS * HIDDEN * held.size
    return {
        "loss": float((sums.loss_sum / alone.loss_sum).detach()) - 1,
        "evaluated": float((seen.loss_sum / alone.loss_sum).detach()) - 1,
        "x": _off(here.grad, there.grad),
        "weight": _off(mine.grad, whole.grad[held.start : held.stop]),
        "products learning": learning.get_total_flops() / product,
        "products looking": looking.get_total_flops() / product,
    }


def _off(mine: torch.Tensor, other: torch.Tensor) -> float:
    return float((mine.double() - other.double()).norm() / other.double().norm())


def test_loss_and_gradients_are_those_of_one_device() -> None:
    for rank in spawn_ranks(2, on_rank):
        for (_, most, chunks), found in zip(CASES, rank, strict=True):
            wrong = max(abs(found[name]) for name in ("loss", "evaluated", "x", "weight"))
            assert wrong < most, found
            assert found["products looking"] == 1, "an evaluation forms no gradient"
            if chunks == 1:  # what is added to a sum in the product itself is not counted
                assert found["products learning"] == 3


def test_one_product_makes_the_gradient_in_the_format_it_is_wanted_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wide: list[int] = []
    monkeypatch.setattr(vocab_parallel, "addmm_fp32_", lambda *_: wide.append(1))
    words = VocabParallel(Mesh(Layout())["tp"], WORDS, sequence_parallel=False)
    x, weight, labels = drawn(torch.bfloat16)
    mine = weight.clone().requires_grad_()
    words.loss(x, labels, mine, None, RULE).loss_sum.backward()  # type: ignore[no-untyped-call]
    assert mine.grad is not None
    assert not wide, "bfloat16 is not made float32 first"
