"""How likely a prompt was is what the whole model says, however the prompt is computed."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.errors import InputError
from meshwright.run.serve.engine import logprobs
from meshwright.run.serve.engine.spec_decode.ngram_proposer import NgramProposer
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import SamplingParams
from tests.run.serve.engine.small import Heard, engine_of, reference, run_out
from tests.run.serve.engine.test_engine import PROMPTS
from tests.run.serve.model.small import hybrid, latent, small

GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


def check(heard: Heard, prompt: tuple[int, ...], make: Any, top: int, choice: int = 0) -> None:
    pieces = [piece for piece in heard.pieces if piece.index == choice]
    told = pieces[0].prompt_logprobs
    assert not any(piece.prompt_logprobs for piece in pieces[1:])
    with torch.no_grad():
        whole_TV = make()(torch.tensor([prompt]))[0].float().log_softmax(1)
    assert [each.token_id for each in told] == list(prompt[1:])
    for each, row_V in zip(told, whole_TV, strict=False):
        assert each.logprob == pytest.approx(float(row_V[each.token_id]), abs=1e-4)
        values, tokens = row_V.topk(top)
        assert [token for token, _ in each.top_logprobs] == tokens.tolist()
        assert [value for _, value in each.top_logprobs] == pytest.approx(values.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("make", "limits"),
    [
        (small, {}),
        (small, {"long_prefill_token_threshold": 3}),
        (small, {"enable_chunked_prefill": False, "max_num_batched_tokens": 64}),
        (latent, {"max_num_batched_tokens": 9}),
        (hybrid, {"long_prefill_token_threshold": 5}),
        (small, {"max_num_batched_tokens": 9, "parts": {"proposer": NgramProposer(2)}}),
    ],
)
def test_likelihoods_of_prompts_are_those_of_the_whole_model(
    make: Any, limits: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "_AT_ONCE", 4)
    engine, sinks = engine_of(make(), **limits), [Heard() for _ in PROMPTS]
    for top, (prompt, sink) in enumerate(zip(PROMPTS, sinks, strict=True)):
        # One of them asks for nothing.
        wanted = None if top == 4 else top
        engine.add_request(
            Request(prompt_token_ids=prompt, sampling_params=GREEDY, prompt_logprobs=wanted), sink
        )
    run_out(engine)
    for top, (prompt, sink) in enumerate(zip(PROMPTS, sinks, strict=True)):
        assert sink.tokens() == reference(make, prompt, 4)
        if top == 4:
            assert not sink.pieces[0].prompt_logprobs
        else:
            check(sink, prompt, make, top)


def test_what_lies_in_the_cache_is_computed_again_to_tell_of_it() -> None:
    engine, sinks = engine_of(small()), [Heard(), Heard()]
    for sink, top in zip(sinks, (None, 1), strict=True):
        engine.add_request(
            Request(prompt_token_ids=PROMPTS[3], sampling_params=GREEDY, prompt_logprobs=top), sink
        )
        run_out(engine)
    assert sinks[1].pieces[0].cached_tokens == 0
    check(sinks[1], PROMPTS[3], small, 1)


@pytest.mark.parametrize("make", [small, hybrid])
def test_every_choice_tells(make: Any) -> None:
    engine, sink = engine_of(make()), Heard()
    sampling = SamplingParams(temperature=0.0, max_tokens=3, n=3)
    engine.add_request(
        Request(prompt_token_ids=PROMPTS[2], sampling_params=sampling, prompt_logprobs=2), sink
    )
    run_out(engine)
    for choice in range(3):
        check(sink, PROMPTS[2], make, 2, choice)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_who_makes_room_tells_nothing_twice(preemption: str) -> None:
    engine = engine_of(
        small(),
        blocks=14,
        preemption_mode=preemption,
        num_cpu_blocks=16,
        max_num_batched_tokens=8,
        watermark=0.0,
    )
    sinks = [Heard() for _ in PROMPTS]
    for number, (prompt, sink) in enumerate(zip(PROMPTS, sinks, strict=True)):
        sampling = SamplingParams(temperature=0.0, max_tokens=20)
        ask = Request(
            prompt_token_ids=prompt, sampling_params=sampling, prompt_logprobs=1, priority=number
        )
        engine.add_request(ask, sink)
        # Later ones go first, so that some make room in the midst of their prompt.
        engine.step()
        engine.step()
    run_out(engine)
    assert engine.scheduler.num_preemptions > 0
    for prompt, sink in zip(PROMPTS, sinks, strict=True):
        assert sink.tokens() == reference(small, prompt, 20)
        check(sink, prompt, small, 1)


def test_a_row_is_waited_for_once() -> None:
    engine, sinks = engine_of(small(), max_num_seqs=1), [Heard(), Heard()]
    for sink in sinks:
        engine.add_request(Request(prompt_token_ids=PROMPTS[1], sampling_params=GREEDY), sink)
    run_out(engine)
    waited = [sink.pieces[0].queue_s for sink in sinks]
    assert waited[0] is not None
    assert waited[1] is not None
    assert 0 <= waited[0] < waited[1]
    assert all(piece.queue_s is None for sink in sinks for piece in sink.pieces[1:])


def test_no_more_than_twenty_are_told() -> None:
    with pytest.raises(InputError, match="prompt_logprobs"):
        engine_of(small()).add_request(
            Request(prompt_token_ids=(1, 2), prompt_logprobs=21), Heard()
        )
