"""Guesses change how fast answers come, and no token of them."""

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.errors import InputError
from meshwright.run.serve.engine.sequence_state import SequenceState
from meshwright.run.serve.engine.spec_decode.ngram_proposer import NgramProposer
from tests.run.serve.engine.small import asked, engine_of, reference
from tests.run.serve.engine.test_engine import PROMPTS, expected
from tests.run.serve.model.small import hybrid, small


class Knowing(NgramProposer):
    """Guesses right, but for every third token."""

    def __init__(self, output: int, wrong: int = 3) -> None:
        super().__init__()
        self._output, self._wrong = output, wrong

    def propose_lengths(self, answers: Sequence[SequenceState]) -> list[int]:
        return [len(self._ahead(answer)) for answer in answers]

    def propose(
        self, answers: Sequence[SequenceState], most: Sequence[int]
    ) -> list[tuple[int, ...]]:
        return [self._ahead(each)[:count] for each, count in zip(answers, most, strict=True)]

    def _ahead(self, answer: SequenceState) -> tuple[int, ...]:
        whole = reference(small, answer.request.prompt_token_ids, self._output)
        ahead = whole[answer.output_token_count : answer.output_token_count + 4]
        return tuple(
            (token + 1) % 61 if (answer.output_token_count + place) % self._wrong == 0 else token
            for place, token in enumerate(ahead)
        )


@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_batched_tokens": 9},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
    ],
    ids=str,
)
def test_greedy_answers_are_the_same(limits: dict[str, Any]) -> None:
    engine = engine_of(small(), parts={"proposer": Knowing(20)}, **limits)
    heard = asked(engine, PROMPTS, output=20)
    assert [each.tokens() for each in heard] == expected(output=20)
    assert (engine.scheduler.block_pool.used_block_count, engine.is_idle) == (0, True)


def test_right_guesses_save_steps() -> None:
    steps = []
    for wrong in (10**9, 1):
        engine = engine_of(small(), parts={"proposer": Knowing(21, wrong)})
        asked(engine, PROMPTS[1:2], output=21)
        steps.append(engine.stats().steps)
    # One step for the prompt, then five tokens with every step, or one.
    assert steps == [1 + 4, 1 + 20]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_making_room_changes_no_answer(preemption: str) -> None:
    # Blocks for guesses that were wrong hold nothing worth keeping.
    limits = {"preemption_mode": preemption, "num_cpu_blocks": 16}
    engine = engine_of(small(), blocks=13, parts={"proposer": Knowing(20)}, **limits)
    heard = asked(engine, PROMPTS, output=20)
    assert engine.scheduler.num_preemptions > 0
    assert [each.tokens() for each in heard] == expected(output=20)


def test_drawn_answers_with_a_seed_are_the_same() -> None:
    plain = asked(engine_of(small()), PROMPTS[:3], temperature=0.7, seed=3)
    guessed = asked(
        engine_of(small(), parts={"proposer": NgramProposer()}),
        PROMPTS[:3],
        temperature=0.7,
        seed=3,
    )
    assert [each.tokens() for each in guessed] == [each.tokens() for each in plain]


def test_what_came_before_is_looked_up() -> None:
    prompt = PROMPTS[4] * 3
    engine = engine_of(small(), parts={"proposer": NgramProposer()})
    (heard,) = asked(engine, [prompt], output=20)
    assert heard.tokens() == reference(small, prompt, 20)
    assert any(len(piece.token_ids) > 1 for piece in heard.pieces) == (engine.stats().steps < 20)


def test_likelihoods_come_with_every_token() -> None:
    engine = engine_of(small(), parts={"proposer": Knowing(12)})
    (heard,) = asked(engine, PROMPTS[1:2], logprobs=1)
    told = [each for piece in heard.pieces for each in piece.logprobs]
    assert [each.token_id for each in told] == heard.tokens() == expected()[1]
    assert all(each.top_logprobs[0][0] == each.token_id for each in told)


def test_choices_guess_on_their_own() -> None:
    engine = engine_of(small(), parts={"proposer": Knowing(12)})
    (heard,) = asked(engine, [PROMPTS[2]], n=3)
    assert all(heard.tokens(choice) == expected()[2] for choice in range(3))


def test_states_cannot_be_taken_back() -> None:
    with pytest.raises(InputError, match="recurrent"):
        engine_of(hybrid(), parts={"proposer": NgramProposer()})
