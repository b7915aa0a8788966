"""Ranks that hold some words each find the log-probabilities, and gradients, of one device."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="runs gloo ranks")

import torch

from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.nn.sharding.shard_spec import split_evenly
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.tensor_parallel.vocab_parallel import VocabParallel
from meshwright.run.posttrain.objectives import vocab_parallel_logprobs
from meshwright.run.posttrain.objectives.token_logprobs import TokenLogprobs, compute_token_logprobs
from meshwright.run.posttrain.objectives.vocab_parallel_logprobs import (
    compute_vocab_parallel_logprobs,
)
from meshwright.spec.layout import Layout

TOKENS, HIDDEN, WORDS = 11, 8, 61
CASES: list[dict[str, Any]] = [
    {"dtype": torch.float32, "most": 1e-5, "pieces": 1, "rule": {}},
    {"dtype": torch.float32, "most": 1e-5, "pieces": 3, "rule": {"softcap": 3.0, "scale": 0.5}},
    {"dtype": torch.bfloat16, "most": 2e-2, "pieces": 1, "rule": {}},
    {"dtype": torch.float32, "most": 1e-5, "pieces": 2, "rule": {"rest": True}},
    # Next to nothing is left for words that are not given, about 1e-11.
    {"dtype": torch.float32, "most": 1e-5, "pieces": 2, "rule": {"rest": True}, "lift": 28.0},
    {"dtype": torch.float32, "most": 1e-5, "pieces": 1,
     "rule": {"rest": True, "softcap": 9.0, "scale": 0.5}},
    {"dtype": torch.bfloat16, "most": 2e-2, "pieces": 1, "rule": {"rest": True}},
]  # fmt: skip


def on_rank() -> list[dict[str, float]]:
    torch.set_num_threads(1)
    mesh = Mesh(Layout(tp=2))
    return [compared(mesh, **case) for case in CASES]


def compared(
    mesh: Mesh, *, dtype: torch.dtype, pieces: int, lift: float = 0.0, **given: Any
) -> dict[str, float]:
    """Return how far what this rank finds is from one device's, as shares."""
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randn(*shape, generator=generator).to(dtype)
             for shape in ((TOKENS, HIDDEN), (WORDS, HIDDEN), (WORDS,))]  # fmt: skip
    words = torch.stack([torch.randperm(WORDS, generator=generator)[:4] for _ in range(TOKENS)])
    if lift:
        words[:] = torch.tensor([0, 1, 40, 41])
        drawn[2][words[0]] += lift
    words[3, 1] = IGNORE_INDEX
    weights = torch.randn(TOKENS, 5, generator=generator)
    held = split_evenly(WORDS, 2, mesh.rank)
    # One rank has a word less, and still the same pieces.
    vocab_parallel_logprobs.CHUNK_BYTES = 4 * split_evenly(WORDS, 2, 0).size * -(-TOKENS // pieces)
    one = [each.clone().requires_grad_() for each in drawn]
    about = {**given["rule"], "entropy": True}
    whole = compute_token_logprobs(one[0], one[1], words, bias=one[2], **about)
    found = _joined(whole)
    (found * weights[:, : found.shape[1]]).sum().backward()  # type: ignore[no-untyped-call]
    cuts = (slice(None), *[slice(held.start, held.stop)] * 2)
    mine = [each[cut].clone().requires_grad_() for each, cut in zip(drawn, cuts, strict=True)]
    shared = VocabParallel(mesh["tp"], WORDS, sequence_parallel=False)
    x, weight, bias = mine
    own = compute_vocab_parallel_logprobs(shared, x, weight, bias, words, **about)
    here = _joined(own)
    assert torch.equal(
        here,
        _joined(compute_vocab_parallel_logprobs(shared, x, weight, bias, words, **given["rule"])),
    )
    assert whole.entropy is not None
    assert own.entropy is not None
    assert not own.entropy.requires_grad
    (here * weights[:, : found.shape[1]]).sum().backward()  # type: ignore[no-untyped-call]
    off = {"logprobs": _off(here.detach(), found.detach())}
    off["entropy"] = _off(own.entropy, whole.entropy.detach())
    for name, part, other, cut in zip(("x", "weight", "bias"), mine, one, cuts, strict=True):
        assert part.grad is not None
        assert other.grad is not None
        off[name] = _off(part.grad, other.grad[cut])
    return off


def _joined(found: TokenLogprobs) -> torch.Tensor:
    """Return all of it side by side."""
    logprobs, _, rest = found
    return logprobs if rest is None else torch.cat([logprobs, rest[:, None]], 1)


def _off(mine: torch.Tensor, other: torch.Tensor) -> float:
    return float((mine.double() - other.double()).norm() / other.double().norm())


@pytest.mark.slow
def test_log_probabilities_and_gradients_are_those_of_one_device() -> None:
    for rank in spawn_ranks(2, on_rank):
        for case, off in zip(CASES, rank, strict=True):
            assert max(off.values()) < case["most"], (case, off)
