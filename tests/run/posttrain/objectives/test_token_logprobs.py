"""Log-probabilities from hidden vectors in pieces, against all logits at once and autograd."""

from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="objectives are functions of torch's tensors")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.kernels.triton_compat import HAS_TRITON
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.weight_init import materialize
from meshwright.run.posttrain.objectives.decoder_logprobs import compute_decoder_logprobs
from meshwright.run.posttrain.objectives.token_logprobs import (
    compute_selected_logprobs,
    compute_token_logprobs,
)
from meshwright.spec.model import build_decoder_model

shapes = st.fixed_dictionaries(
    {
        "softcap": st.sampled_from([None, 3.0]),
        "scale": st.sampled_from([None, 0.5]),
        "temperature": st.sampled_from([1.0, 0.7]),
    }
)


def given_(
    tokens: int, words: int, dtype: torch.dtype, *, bias: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * 10 + words)
    x = torch.randn(tokens, 6, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(11, 6, generator=generator, dtype=torch.float64).to(dtype)
    extra = torch.randn(11, generator=generator, dtype=torch.float64).to(dtype) if bias else None
    chosen = torch.stack([torch.randperm(11, generator=generator)[:words] for _ in range(tokens)])
    for each in (x, weight, extra):
        if each is not None:
            each.requires_grad_()
    return x, weight, extra, chosen


def at_once(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rule: dict[str, Any]
) -> torch.Tensor:
    logits = torch.nn.functional.linear(x, weight, bias)
    logits = logits * (rule["scale"] or 1.0)
    if rule["softcap"]:
        logits = rule["softcap"] * torch.tanh(logits / rule["softcap"])
    shaped: torch.Tensor = logits / rule["temperature"]
    return shaped.log_softmax(-1)


@settings(max_examples=40)
@given(st.integers(1, 9), st.integers(1, 4), shapes, st.booleans(), st.integers(1, 2000))
def test_words_entropy_and_rest_have_values_and_gradients_of_all_logits(
    tokens: int, words: int, rule: dict[str, Any], bias: bool, chunk_bytes: int
) -> None:
    x, weight, extra, chosen = given_(tokens, words, torch.float64, bias=bias)
    leaves = [each for each in (x, weight, extra) if each is not None]
    rest_of = torch.ones(tokens, 11, dtype=torch.bool).scatter(1, chosen, False)
    # What is ignored is among the rest, unless it is given too: word 0 may be.
    asked = torch.cat([chosen, torch.full((tokens, 1), IGNORE_INDEX)], 1)
    found = compute_token_logprobs(
        x, weight, asked, bias=extra, entropy=True, rest=True, chunk_bytes=chunk_bytes, **rule
    )
    assert found.entropy is not None
    assert found.other_logprobs is not None
    all_of = at_once(x, weight, extra, rule)
    want = (
        all_of.gather(1, chosen),
        -(all_of.exp() * all_of).sum(-1),
        all_of.masked_fill(~rest_of, -torch.inf).logsumexp(-1),
    )
    have = (found.logprobs[:, :-1], found.entropy, found.other_logprobs)
    torch.testing.assert_close(have, want)
    # Weights that differ from token to token, and depend on the result.
    mine, theirs = (
        torch.autograd.grad(one.exp().square().sum() + two.cos().sum() + three.sin().sum(), leaves)
        for one, two, three in (have, want)
    )
    torch.testing.assert_close(mine, theirs)


def test_no_other_word_is_never_said_and_pulls_nowhere() -> None:
    x, weight, _, chosen = given_(3, 11, torch.float32)
    found = compute_token_logprobs(x, weight, chosen, rest=True)
    assert found.other_logprobs is not None
    assert torch.isneginf(found.other_logprobs).all()
    (slope,) = torch.autograd.grad(
        found.other_logprobs.masked_fill(found.other_logprobs < 0, 0).sum(), x
    )
    assert slope.eq(0).all()


@settings(max_examples=40)
@given(st.integers(1, 9), shapes, st.booleans(), st.integers(1, 1000))
def test_one_word_goes_through_the_rows(
    tokens: int, rule: dict[str, Any], bias: bool, chunk_bytes: int
) -> None:
    x, weight, extra, chosen = given_(tokens, 1, torch.float32, bias=bias)
    leaves = [each for each in (x, weight, extra) if each is not None]
    found = compute_selected_logprobs(
        x, weight, chosen[:, 0], bias=extra, chunk_bytes=chunk_bytes, **rule
    )
    want = at_once(x, weight, extra, rule).gather(1, chosen)[:, 0]
    torch.testing.assert_close(found, want)
    mine = torch.autograd.grad(found.exp().square().sum(), leaves)
    theirs = torch.autograd.grad(want.exp().square().sum(), leaves)
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ignored_words_are_nought_and_pull_nowhere(dtype: torch.dtype) -> None:
    x, weight, _, chosen = given_(4, 1, dtype)
    chosen[1:3] = IGNORE_INDEX
    found = compute_selected_logprobs(x, weight, chosen[:, 0])
    assert found[1:3].eq(0).all()
    assert found[0] < 0
    dx, dw = torch.autograd.grad(found.sum(), (x, weight))
    assert dx[1:3].eq(0).all()
    kept = compute_selected_logprobs(x[[0, 3]], weight, chosen[[0, 3], 0])
    torch.testing.assert_close(torch.autograd.grad(kept.sum(), weight)[0], dw)


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton, whose interpreter runs the kernel")
def test_kernel_says_the_same_as_torch() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, weight, _, chosen = given_(5, 1, torch.float32)
    chosen[2] = IGNORE_INDEX
    x, weight = (each.detach().to(device).requires_grad_() for each in (x, weight))
    chosen = chosen.to(device)
    mine, theirs = (
        compute_selected_logprobs(
            x, weight, chosen[:, 0], backend=each, temperature=0.8, chunk_bytes=99
        )
        for each in ("triton", "torch")
    )
    torch.testing.assert_close(mine, theirs)
    slopes = [torch.autograd.grad(each.exp().sum(), (x, weight)) for each in (mine, theirs)]
    torch.testing.assert_close(slopes[0], slopes[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("capped", [False, True])
def test_decoder_says_the_same_as_its_logits(capped: bool) -> None:
    model = build_decoder_model("tiny", hidden=32, layers=1, heads=2, kv_heads=1, ffn=48, vocab=17)
    model = msgspec.structs.replace(model, logit_softcap=2.0) if capped else model
    built = build_decoder(model, dtype=torch.float32)
    materialize(built, "cpu", seed=1)
    tokens = torch.randint(17, (2, 6), generator=torch.Generator().manual_seed(4))
    words = torch.cat([tokens[:, 1:], torch.full((2, 1), IGNORE_INDEX)], 1)
    found, entropy = compute_decoder_logprobs(
        built, built.compute_hidden_states(tokens), words, entropy=True
    )
    want = built(tokens).float().log_softmax(-1)
    torch.testing.assert_close(found[:, :-1], want[:, :-1].gather(-1, words[:, :-1, None])[..., 0])
    assert found[:, -1].eq(0).all()
    torch.testing.assert_close(entropy, -(want.exp() * want).sum(-1))


def test_logits_are_never_all_there() -> None:
    """Count the rows of every product: no piece is larger than asked for."""

    class Counting:
        rows: list[int]

        def __init__(self) -> None:
            self.rows = []

        def forward(self, x_NK: torch.Tensor, w_MK: torch.Tensor) -> torch.Tensor:
            self.rows.append(len(x_NK))
            return x_NK @ w_MK.t()

        def dgrad(self, dy_NM: torch.Tensor, w_MK: torch.Tensor) -> torch.Tensor:
            return dy_NM @ w_MK

        def wgrad(self, dy_NM: torch.Tensor, x_NK: torch.Tensor) -> torch.Tensor:
            return dy_NM.t() @ x_NK

    x, weight, _, chosen = given_(10, 1, torch.float32)
    products = Counting()
    four_rows = 4 * 11 * 4
    found = compute_selected_logprobs(x, weight, chosen[:, 0], chunk_bytes=four_rows, gemm=products)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert products.rows == [4, 4, 2, 4, 4, 2]


def test_bfloat16_keeps_log_probabilities_in_float32() -> None:
    x, weight, _, chosen = given_(9, 1, torch.bfloat16)
    found = compute_selected_logprobs(x, weight, chosen[:, 0])
    assert found.dtype == torch.float32
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_no_tokens_give_no_log_probabilities() -> None:
    x, weight, _, _ = given_(1, 1, torch.float32)
    assert compute_selected_logprobs(x[:0], weight, torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_what_does_not_fit_is_refused() -> None:
    x, weight, _, chosen = given_(3, 1, torch.float32)
    with pytest.raises(InputError, match="do not fit"):
        compute_selected_logprobs(x, weight, chosen[:2, 0])
    with pytest.raises(InputError, match="temperature is 0"):
        compute_selected_logprobs(x, weight, chosen[:, 0], temperature=0.0)
