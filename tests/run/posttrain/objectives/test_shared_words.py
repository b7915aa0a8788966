"""Ranks that hold some words each find the log-probabilities, and gradients, of one device."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="runs gloo ranks")

import torch

from meshwright.run.kernels.labels import IGNORED
from meshwright.run.nn.holding import even
from meshwright.run.parallel.collective.launch import launch
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.vocabulary import WordsOfRanks
from meshwright.run.posttrain.objectives import shared_words
from meshwright.run.posttrain.objectives.chosen import word_logprobs
from meshwright.run.posttrain.objectives.shared_words import shared_word_logprobs
from meshwright.run.posttrain.objectives.shared_words import shared_words as of_shared_words
from meshwright.spec.layout import Layout

TOKENS, HIDDEN, WORDS = 11, 8, 61
CASES: list[dict[str, Any]] = [
    {"dtype": torch.float32, "most": 1e-5, "pieces": 1, "rule": {}},
    {"dtype": torch.float32, "most": 1e-5, "pieces": 3, "rule": {"softcap": 3.0, "scale": 0.5}},
    {"dtype": torch.bfloat16, "most": 2e-2, "pieces": 1, "rule": {}},
]


def on_rank() -> list[dict[str, float]]:
    torch.set_num_threads(1)
    mesh = Mesh(Layout(tp=2))
    return [compared(mesh, **case) for case in CASES]


def compared(mesh: Mesh, *, dtype: torch.dtype, pieces: int, **given: Any) -> dict[str, float]:
    """Return how far what this rank finds is from one device's, as shares."""
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randn(*shape, generator=generator).to(dtype)
             for shape in ((TOKENS, HIDDEN), (WORDS, HIDDEN), (WORDS,))]  # fmt: skip
    words = torch.stack([torch.randperm(WORDS, generator=generator)[:4] for _ in range(TOKENS)])
    words[3, 1] = IGNORED
    weights = torch.randn(TOKENS, 4, generator=generator)
    held = even(WORDS, 2, mesh.rank)
    # One rank has a word less, and still the same pieces.
    shared_words.CHUNK_BYTES = 4 * even(WORDS, 2, 0).size * -(-TOKENS // pieces)
    one = [each.clone().requires_grad_() for each in drawn]
    about = {**given["rule"], "entropy": True}
    found, spread = word_logprobs(one[0], one[1], words, bias=one[2], **about)
    (found * weights).sum().backward()  # type: ignore[no-untyped-call]
    cuts = (slice(None), *[slice(held.start, held.stop)] * 2)
    mine = [each[cut].clone().requires_grad_() for each, cut in zip(drawn, cuts, strict=True)]
    shared = WordsOfRanks(mesh["tp"], WORDS, sequence=False)
    x, weight, bias = mine
    here, own_spread = of_shared_words(shared, x, weight, bias, words, **about)
    assert torch.equal(here, shared_word_logprobs(shared, x, weight, bias, words, **given["rule"]))
    assert spread is not None
    assert own_spread is not None
    assert not own_spread.requires_grad
    (here * weights).sum().backward()  # type: ignore[no-untyped-call]
    off = {"logprobs": _off(here.detach(), found.detach())}
    off["entropy"] = _off(own_spread, spread.detach())
    for name, own, other, cut in zip(("x", "weight", "bias"), mine, one, cuts, strict=True):
        assert own.grad is not None
        assert other.grad is not None
        off[name] = _off(own.grad, other.grad[cut])
    return off


def _off(mine: torch.Tensor, other: torch.Tensor) -> float:
    return float((mine.double() - other.double()).norm() / other.double().norm())


@pytest.mark.slow
def test_log_probabilities_and_gradients_are_those_of_one_device() -> None:
    for rank in launch(2, on_rank):
        for case, off in zip(CASES, rank, strict=True):
            assert max(off.values()) < case["most"], (case, off)
