"""A draft model changes how fast answers come, and no token of them, nor how likely one is."""

import random
import secrets
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

import msgspec
import torch

from meshwright.errors import InputError
from meshwright.run.nn.decoder import Decoder
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.model_runner.model_runner import ModelRunner
from meshwright.run.serve.engine.spec_decode.draft_model_proposer import DraftModelProposer
from meshwright.run.serve.model.kv_cache import PagedKVCache
from meshwright.run.serve.model.served_model import ServedModel
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling.sampler import TokenSampler
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.spec.scheduler_config import SchedulerConfig
from tests.run.serve.engine.small import LENGTH, Heard, asked, engine_of, run_out
from tests.run.serve.engine.test_engine import PROMPTS, expected
from tests.run.serve.model.small import hybrid, latent, made, small
from tests.run.serve.sampling.goodness import LIMIT, deviation


def near() -> Decoder:
    """Return a draft that is often right: the model with somewhat other weights."""
    decoder = made(small().model)
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.add_(0.003 * torch.randn(weight.shape))
    return decoder


class Counting(ModelRunner):
    """Counts the tokens of prompts that a draft computes."""

    computed = 0

    def execute_model(self, orders: Any) -> Any:
        self.computed += sum(len(part.token_ids) for part in orders.chunks)
        return super().execute_model(orders)


def drafted(
    model: Decoder, draft: Decoder, *, most: int = 4, blocks: int = 64, length: int = LENGTH,
    **given: Any,
) -> tuple[Engine, Counting]:  # fmt: skip
    limits = SchedulerConfig(
        **{"max_num_batched_tokens": 24, "max_num_seqs": 8, "block_size": 4, **given}
    )
    rows = limits.max_num_seqs
    sampler = TokenSampler(rows + 1, model.model.vocab, "cpu")

    def forward(decoder: Decoder, reach: int) -> ServedModel:
        cache = PagedKVCache(
            decoder, blocks, limits.block_size, num_host_blocks=limits.num_cpu_blocks
        )
        return ServedModel(decoder, cache, max_model_len=reach, state_rows=rows + 1)

    runner = ModelRunner(forward(model, LENGTH), sampler, rows)
    second = Counting(forward(draft, length), sampler, rows)
    guesses = DraftModelProposer(
        second, model.model.vocab, most, max_num_batched_tokens=limits.max_num_batched_tokens
    )
    return Engine(runner, limits, proposer=guesses), second


def tokens_of(heard: list[Heard]) -> list[list[int]]:
    return [each.tokens() for each in heard]


@pytest.mark.parametrize(
    ("draft", "limits"),
    [
        (near, {}),
        (small, {"max_num_batched_tokens": 9}),
        (near, {"long_prefill_token_threshold": 3}),
        (small, {"enable_chunked_prefill": False, "max_num_batched_tokens": 64}),
        (latent, {"max_num_seqs": 2}),
        (near, {"enable_prefix_caching": False}),
    ],
)
def test_greedy_answers_are_the_same(draft: Any, limits: dict[str, Any]) -> None:
    engine, _ = drafted(small(), draft(), **limits)
    assert tokens_of(asked(engine, PROMPTS, output=20)) == expected(output=20)
    assert (engine.scheduler.block_pool.used_block_count, engine.is_idle) == (0, True)


def test_a_draft_that_is_the_model_is_always_right() -> None:
    for prompt in PROMPTS:
        engine, draft = drafted(small(), small(), max_num_batched_tokens=64)
        (heard,) = asked(engine, [prompt], output=21)
        # What comes with the prompt, then five tokens with every step.
        assert [len(piece.token_ids) for piece in heard.pieces] == [1, 5, 5, 5, 5]
        # Single tokens go another way than prompts.
        assert draft.computed == (len(prompt) if len(prompt) > 1 else 0)


def test_a_draft_that_is_often_wrong_still_saves_steps_or_rests() -> None:
    plain = engine_of(small())
    asked(plain, PROMPTS[1:2], output=40)
    steps = {}
    for name, make in (("near", near), ("latent", latent)):
        engine, _ = drafted(small(), make())
        assert tokens_of(asked(engine, PROMPTS[1:2], output=40)) == expected(PROMPTS[1:2], 40)
        steps[name] = engine.stats().steps
    assert steps["near"] < 0.8 * plain.stats().steps
    assert steps["latent"] <= plain.stats().steps


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("draft", [small, near])
def test_making_room_changes_no_answer(draft: Any, preemption: str) -> None:
    engine, _ = drafted(small(), draft(), blocks=14, preemption_mode=preemption, num_cpu_blocks=16)
    heard = asked(engine, PROMPTS, output=20)
    assert engine.scheduler.num_preemptions > 0
    assert tokens_of(heard) == expected(output=20)
    if draft is small:
        # Whatever the blocks held before, the draft knows what it has to compute anew: single
        # tokens come with a prompt, with what is left, and where prompts took all the room.
        pieces = [piece for each in heard for piece in each.pieces]
        single = sum(len(piece.token_ids) == 1 for piece in pieces)
        assert single <= 3 * len(PROMPTS) + 2 * engine.scheduler.num_preemptions
        assert sum(len(piece.token_ids) == 5 for piece in pieces) > len(PROMPTS)


def test_beginnings_that_the_draft_has_computed_are_not_computed_again() -> None:
    engine, draft = drafted(small(), small())
    start = PROMPTS[3][:16]
    asked(engine, [start + PROMPTS[1]])
    first = draft.computed
    (heard,) = asked(engine, [start + PROMPTS[4]])
    assert heard.tokens() == expected([start + PROMPTS[4]])[0]
    assert heard.pieces[0].cached_tokens == 16
    assert draft.computed - first == len(PROMPTS[4])
    assert max(len(piece.token_ids) for piece in heard.pieces) == 5


def test_beginnings_that_only_the_model_has_computed_are_computed_by_the_draft() -> None:
    engine, draft = drafted(small(), small())
    start = PROMPTS[3][:16]
    # An answer of one token is over before the draft has seen it.
    asked(engine, [start + PROMPTS[1]], output=1)
    assert draft.computed == 0
    (heard,) = asked(engine, [start + PROMPTS[4]])
    assert heard.pieces[0].cached_tokens == 16
    assert draft.computed == 16 + len(PROMPTS[4])
    assert [len(piece.token_ids) for piece in heard.pieces] == [1, 5, 5, 1]


def test_choices_share_what_the_draft_computes() -> None:
    engine, draft = drafted(small(), small())
    (heard,) = asked(engine, [PROMPTS[2]], n=3)
    assert all(heard.tokens(choice) == expected()[2] for choice in range(3))
    # Seventeen tokens in blocks of four: each choice has a last one of its own.
    assert draft.computed == 17 + 1 + 1


def test_a_draft_that_sees_less_falls_silent() -> None:
    engine, _ = drafted(small(), small(), length=24)
    heard = asked(engine, PROMPTS, output=20)
    assert tokens_of(heard) == expected(output=20)
    assert all(len(piece.token_ids) == 1 for piece in heard[3].pieces)


@pytest.mark.parametrize(
    "asks",
    [{"top_k": 5}, {"frequency_penalty": 1.0, "logit_bias": {3: 2.0}}, {"n": 2}],
    ids=str,
)
def test_drawn_answers_with_a_seed_are_the_same(asks: dict[str, Any]) -> None:
    settings = {"temperature": 0.7, "seed": 3, "output": 12, **asks}
    plain = asked(engine_of(small()), PROMPTS[:4], **settings)
    engine, _ = drafted(small(), near())
    heard = asked(engine, PROMPTS[:4], **settings)
    for choice in range(asks.get("n", 1)):
        assert [e.tokens(choice) for e in heard] == [e.tokens(choice) for e in plain]


def test_wide_tables_of_words_are_cut_and_narrow_ones_filled() -> None:
    for vocab in (64, 50):
        draft = made(msgspec.structs.replace(small().model, vocab=vocab))
        engine, _ = drafted(small(), draft)
        assert tokens_of(asked(engine, PROMPTS[:3])) == expected(PROMPTS[:3])


def test_recurrent_drafts_are_refused() -> None:
    with pytest.raises(InputError, match="only attends"):
        drafted(small(), hybrid())


def _exact(prompt: tuple[int, ...], top: int) -> dict[tuple[int, ...], float]:
    """Return the chances of the first three tokens, of the `top` likeliest each."""
    decoder = small()
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown = {}
        for tokens, chance in found.items():
            with torch.no_grad():
                logits = decoder(torch.tensor([[*prompt, *tokens]]))[0, -1]
            best = logits.topk(top)
            for token, each in zip(best.indices.tolist(), best.values.softmax(0), strict=True):
                grown[(*tokens, token)] = chance * float(each)
        found = grown
    return found


@pytest.mark.slow
@pytest.mark.parametrize("named", [True, False])
def test_drawn_answers_have_the_chances_of_the_model(
    named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = random.Random(11)
    monkeypatch.setattr(secrets, "randbits", source.getrandbits)
    engine, _ = drafted(
        small(), near(), most=2, blocks=1500, max_num_seqs=256, max_num_batched_tokens=1024
    )
    heard = []
    for number in range(16):
        sampling = SamplingParams(top_k=3, max_tokens=3, n=128, seed=number if named else None)
        heard.append(Heard())
        engine.add_request(
            Request(prompt_token_ids=PROMPTS[1], sampling_params=sampling), heard[-1]
        )
    run_out(engine)
    exact = _exact(PROMPTS[1], 3)
    cells = {tokens: cell for cell, tokens in enumerate(exact)}
    drawn = [cells[tuple(each.tokens(choice))] for each in heard for choice in range(128)]
    assert deviation(torch.tensor(drawn), torch.tensor(list(exact.values()))) < LIMIT


@pytest.mark.slow
def test_more_guesses_are_taken_where_nobody_named_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    source = random.Random(12)
    monkeypatch.setattr(secrets, "randbits", source.getrandbits)
    pieces = []
    for seed in (5, None):
        engine, _ = drafted(
            small(), near(), blocks=512, max_num_seqs=64, max_num_batched_tokens=512
        )
        (heard,) = asked(engine, [PROMPTS[1]], output=24, n=64, temperature=3.0, seed=seed)
        pieces.append(len(heard.pieces))
    assert pieces[1] < pieces[0] < 64 * 24 / 2
