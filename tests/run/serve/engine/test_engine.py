"""Answers are those of the model alone, whatever the engine does to many of them at a time."""

import random
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.errors import InputError
from meshwright.run.serve.engine.model_input import ModelInput
from meshwright.run.serve.engine.model_runner.model_runner import (
    ModelRunner,
    PendingOutput,
    StepLogits,
)
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import SamplingParams
from tests.run.serve.engine.small import Heard, asked, engine_of, reference, run_out
from tests.run.serve.model.small import chunked, hybrid, latent, small

_draw = random.Random(3)
PROMPTS = [tuple(_draw.randrange(61) for _ in range(length)) for length in (1, 5, 17, 30, 8, 23)]


def expected(prompts: Any = PROMPTS, output: int = 12, make: Any = small) -> list[list[int]]:
    return [reference(make, prompt, output) for prompt in prompts]


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 8},
        {"long_prefill_token_threshold": 3},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
        {"max_num_seqs": 2},
        {"enable_prefix_caching": False},
        {"max_cudagraph_capture_size": 24},
        {"max_cudagraph_capture_size": 9, "long_prefill_token_threshold": 5},
    ],
    ids=str,
)
def test_answers_do_not_depend_on_how_they_are_batched(limits: dict[str, Any]) -> None:
    heard = asked(engine_of(small(), **limits), PROMPTS)
    assert [each.tokens() for each in heard] == expected()
    assert all(each.finishes == {0: "length"} for each in heard)


def test_padding_goes_nowhere_however_long_an_engine_runs() -> None:
    engine = engine_of(small(), max_num_seqs=8)
    for _ in range(3):  # seven rows in a graph of eight: more steps than a sequence has positions
        asked(engine, [(1, place) for place in range(7)], output=30)
    assert isinstance(engine.runner, ModelRunner)
    assert int(engine.runner.device_rows.positions[-1]) == 0


@pytest.mark.parametrize("make", [chunked, latent, hybrid])
def test_every_kind_of_layer_is_served(make: Any) -> None:
    heard = asked(engine_of(make()), PROMPTS[:4])
    assert [each.tokens() for each in heard] == expected(PROMPTS[:4], make=make)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_making_room_for_others_changes_no_answer(preemption: str) -> None:
    engine = engine_of(small(), blocks=14, preemption_mode=preemption, num_cpu_blocks=16)
    heard = asked(engine, PROMPTS, output=20)
    assert engine.scheduler.num_preemptions > 0
    assert [each.tokens() for each in heard] == expected(output=20)
    assert engine.scheduler.block_pool.used_block_count == 0
    # What was computed twice was asked once.
    assert engine.stats().prompt_tokens == sum(map(len, PROMPTS))


def test_equal_beginnings_are_read_from_the_cache() -> None:
    engine = engine_of(small())
    start = PROMPTS[3][:16]
    prompts = [start + PROMPTS[0], start + PROMPTS[1], start + PROMPTS[4]]
    asked(engine, prompts[:1])
    heard = asked(engine, prompts)
    assert [each.tokens() for each in heard] == expected(prompts)
    assert [each.pieces[0].cached_tokens for each in heard] == [16, 16, 16]
    assert engine.stats().prefix_hits == 48
    assert engine.stats().prompt_tokens == sum(map(len, [prompts[0], *prompts]))


def test_an_answer_is_found_again_when_a_conversation_goes_on() -> None:
    engine = engine_of(small())
    (first,) = asked(engine, [PROMPTS[3]], output=14)
    following = PROMPTS[3] + tuple(first.tokens()) + PROMPTS[1]
    (second,) = asked(engine, [following], output=5)
    assert second.tokens() == reference(small, following, 5)
    # Of 44 tokens the last was drawn and never computed: ten blocks of four are whole.
    assert second.pieces[0].cached_tokens == 40


def test_an_end_of_text_is_the_last_token() -> None:
    whole = reference(small, PROMPTS[1], 12)
    engine = engine_of(small())
    stop = whole[5]
    (heard,) = asked(engine, [PROMPTS[1]], stop_token_ids=(stop,))
    assert heard.tokens() == whole[: whole.index(stop) + 1]
    assert heard.finishes == {0: "stop"}
    assert heard.pieces[-1].stop_reason == stop
    assert (engine.scheduler.block_pool.used_block_count, engine.is_idle) == (0, True)


def test_ends_wait_for_the_least_number_of_tokens() -> None:
    stops = tuple(reference(small, PROMPTS[1], 3))
    (heard,) = asked(engine_of(small()), [PROMPTS[1]], stop_token_ids=stops, min_tokens=5)
    assert len(heard.tokens()) >= 5
    assert not set(heard.tokens()[:5]) & set(stops), "what would end it is not drawn before"


def test_choices_share_a_prompt_and_draw_on_their_own() -> None:
    engine = engine_of(small())
    (heard,) = asked(engine, [PROMPTS[2]], n=3)
    assert all(heard.tokens(choice) == expected()[2] for choice in range(3))
    assert engine.stats().prompt_tokens == len(PROMPTS[2])
    (warm,) = asked(engine, [PROMPTS[2]], n=3, temperature=2.0, seed=5)
    assert len({tuple(warm.tokens(choice)) for choice in range(3)}) == 3
    (again,) = asked(engine, [PROMPTS[2]], n=3, temperature=2.0, seed=5)
    assert [again.tokens(choice) for choice in range(3)] == [
        warm.tokens(choice) for choice in range(3)
    ]


def test_choices_of_a_model_with_states_are_computed_on_their_own() -> None:
    engine = engine_of(hybrid())
    (heard,) = asked(engine, [PROMPTS[2]], n=2)
    (want,) = expected([PROMPTS[2]], make=hybrid)
    assert [heard.tokens(choice) for choice in range(2)] == [want, want]


def test_a_seed_draws_the_same_beside_others() -> None:
    (alone,) = asked(engine_of(small()), [PROMPTS[1]], temperature=1.0, seed=7)
    among = asked(engine_of(small(), max_num_batched_tokens=10), PROMPTS, temperature=1.0, seed=7)
    assert among[1].tokens() == alone.tokens()


def test_likelihoods_are_told_to_those_who_ask() -> None:
    engine = engine_of(small())
    sinks = [Heard(), Heard()]
    for sink, logprobs in zip(sinks, (None, 2), strict=True):
        sampling = SamplingParams(temperature=0.0, max_tokens=3, logprobs=logprobs)
        engine.add_request(Request(prompt_token_ids=PROMPTS[1], sampling_params=sampling), sink)
    run_out(engine)
    assert sinks[0].tokens() == sinks[1].tokens()
    assert not any(piece.logprobs for piece in sinks[0].pieces)
    for piece in sinks[1].pieces:
        (told,) = piece.logprobs
        assert told.token_id == piece.token_ids[0] == told.top_logprobs[0][0]
        assert told.logprob == pytest.approx(told.top_logprobs[0][1])
        assert told.top_logprobs[0][1] >= told.top_logprobs[1][1]


def test_tokens_that_are_there_are_read_before_a_prompt_keeps_the_host_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_of(small())
    compute, read = engine.runner.execute_model, []

    def noted(orders: ModelInput) -> StepLogits | None:
        read.append((bool(orders.chunks), len(engine.take_outputs())))
        return compute(orders)

    monkeypatch.setattr(engine.runner, "execute_model", noted)
    monkeypatch.setattr(PendingOutput, "computed_on_host", False)
    many = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    for prompt in PROMPTS[:2]:
        engine.add_request(Request(prompt_token_ids=tuple(prompt), sampling_params=many), Heard())
        engine.step()
        engine.step()
    # The prompt, a step of decoding, the second prompt beside it, a step of both.
    assert [with_parts for with_parts, _ in read] == [True, False, True, False]
    assert [pieces for _, pieces in read] == [0, 0, 2, 0]


def test_a_processor_reads_a_step_before_the_next_is_decided() -> None:
    engine, heard = engine_of(small()), Heard()
    ask = Request(
        prompt_token_ids=tuple(PROMPTS[0]),
        sampling_params=SamplingParams(temperature=0.0, max_tokens=3),
    )
    engine.add_request(ask, heard)
    engine.step()
    assert not engine.take_outputs()
    engine.step()
    assert len(engine.take_outputs()) == 1


def test_who_is_cancelled_leaves_nothing_behind() -> None:
    engine = engine_of(small(), max_num_seqs=2)
    sinks = [Heard() for _ in PROMPTS]
    asks = [
        Request(prompt_token_ids=prompt, sampling_params=SamplingParams(max_tokens=20))
        for prompt in PROMPTS
    ]
    running = [engine.add_request(ask, sink) for ask, sink in zip(asks, sinks, strict=True)]
    for _ in range(6):
        engine.step()
    for answers in running[1:]:
        engine.abort(answers)
    run_out(engine)
    assert [sink.finishes[0] for sink in sinks] == ["length"] + ["abort"] * 5
    assert (engine.scheduler.block_pool.used_block_count, engine.is_idle) == (0, True)


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (Request(prompt_token_ids=()), "holds no token"),
        (Request(prompt_token_ids=(1, 61)), "61 is no token"),
        (Request(prompt_token_ids=(1,) * 64), "leave no room"),
        (
            Request(prompt_token_ids=(1,), sampling_params=SamplingParams(n=9)),
            "9 answers at a time",
        ),
        (
            Request(prompt_token_ids=(1,), sampling_params=SamplingParams(logit_bias={99: 1.0})),
            "99 is no token",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_at_once(ask: Request, said: str) -> None:
    with pytest.raises(InputError, match=said):
        engine_of(small()).add_request(ask, Heard())
