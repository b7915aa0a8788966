"""A rollout that was drawn before is judged again with its own tokens, as far as they hold."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.run.posttrain.rollout import (
    EnvironmentStep,
    Rollout,
    RolloutConfig,
    RolloutGenerator,
    RolloutTurn,
)
from meshwright.run.posttrain.rollout.generator import RolloutStream
from meshwright.run.posttrain.rollout.verifiers import VerifierPool
from meshwright.run.serve.request import OutputSink, Request
from tests.run.posttrain.rollout.small import Calls, engine

TURNS = RolloutConfig(group_size=1, max_tokens=4, max_turns=3)


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(Calls.verifiers, workers=1) as made:
        yield made


@pytest.fixture(scope="module")
def whole(pool: VerifierPool) -> Rollout:
    """Three turns, two answers of a tool, and a verdict."""
    ((one,),) = RolloutGenerator(engine(), Calls(), pool, TURNS).get_groups(0, [4], version=3)
    return one


def again(pool: VerifierPool, task: Calls, known: Rollout) -> tuple[Rollout, list[Request]]:
    """Judge a rollout again; return it with what the engine was asked for it."""
    drawer: Any = engine()
    add, asked = drawer.add_request, list[Request]()

    def noted(ask: Request, sink: OutputSink) -> Any:
        asked.append(ask)
        return add(ask, sink)

    drawer.add_request = noted
    stream = RolloutStream(RolloutGenerator(drawer, task, pool, TURNS))
    stream.submit([known.key], 3, {known.key: known})
    found: list[Rollout] = []
    while stream.is_busy:
        found += stream.run_step()
    stream.close()
    (one,) = found
    return one, asked


def test_no_engine_is_asked_for_what_is_known(pool: VerifierPool, whole: Rollout) -> None:
    failed = msgspec.structs.replace(whole.rewards[-1], outcome="error", value=0.0, reason="down")
    known = msgspec.structs.replace(whole, rewards=(*whole.rewards[:-1], failed))
    assert not known.has_reward
    found, asked = again(pool, Calls(), known)
    assert not asked
    assert found.turns == whole.turns, "every bit and every time"
    assert (found.reward, found.ending) == (whole.reward, whole.ending)
    assert found.has_reward


def test_what_an_engine_failed_at_is_drawn_again(pool: VerifierPool, whole: Rollout) -> None:
    broken = msgspec.structs.replace(whole.turns[2], tokens=(), logprobs=(), finish="error")
    known = msgspec.structs.replace(
        whole, turns=(*whole.turns[:2], broken), rewards=whole.rewards[:2], ending="error"
    )
    found, asked = again(pool, Calls(), known)
    assert [ask.prompt_token_ids for ask in asked] == [whole.tokens[: -len(whole.turns[2].tokens)]]
    assert found.turns[:2] == whole.turns[:2]
    assert (found.tokens, found.reward) == (whole.tokens, whole.reward)


class Otherwise(Calls):
    """The second answer of the tool is another one."""

    def reset(self, prompt: int, /) -> Any:
        episode: Any = super().reset(prompt)
        step = episode.step

        def said(turn: RolloutTurn, /) -> EnvironmentStep:
            reply: EnvironmentStep = step(turn)
            if reply.observation == (13, 2, 13):
                return msgspec.structs.replace(reply, observation=(13, 9, 13))
            return reply

        episode.step = said
        return episode


def test_turns_behind_another_answer_are_drawn_again(pool: VerifierPool, whole: Rollout) -> None:
    found, asked = again(pool, Otherwise(), whole)
    assert [ask.prompt_token_ids[-3:] for ask in asked] == [(13, 9, 13)]
    assert found.turns[0] == whole.turns[0]
    assert found.turns[1] == msgspec.structs.replace(whole.turns[1], observation=(13, 9, 13))
    assert found.has_reward


def test_another_prompt_is_answered_anew(pool: VerifierPool, whole: Rollout) -> None:
    found, asked = again(pool, Calls(), msgspec.structs.replace(whole, prompt=(1, 2, 3)))
    assert len(asked) == 3
    assert found.tokens == whole.tokens
