"""What the engine drew is what is recorded, whatever was drawn beside it and by whom."""

import threading
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.errors import InputError
from meshwright.run.posttrain.rl.generation.rollout_backend import VerifierFailureMonitor
from meshwright.run.posttrain.rollout import (
    EnvironmentStep,
    Rollout,
    RolloutConfig,
    RolloutGenerator,
    RolloutKey,
    RolloutTurn,
    SortingDigits,
)
from meshwright.run.posttrain.rollout.environment_threads import EnvironmentFailureError
from meshwright.run.posttrain.rollout.generator import RolloutStream
from meshwright.run.posttrain.rollout.seeds import derive_turn_seed
from meshwright.run.posttrain.rollout.verifiers import VerifierPool
from tests.run.posttrain.rollout.small import Calls, decoder, engine

TASK = SortingDigits(digits=3)
REFERENCE = decoder()
DRAWING = RolloutConfig(group_size=4, max_tokens=6, stop_token_ids=(TASK.words.end,))
TURNS = RolloutConfig(group_size=2, max_tokens=4, max_turns=3)


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool([*TASK.verifiers, *Calls.verifiers], workers=1) as made:
        yield made


def draws(rollouts: list[tuple[Rollout, ...]]) -> list[tuple[int, ...]]:
    return [rollout.tokens for group in rollouts for rollout in group]


def told_again(rollout: Rollout) -> list[float]:
    """Return the log-probabilities of a rollout's tokens, by one pass over all of them."""
    ids_1T = torch.tensor([rollout.tokens])
    with torch.no_grad():
        logprobs_TV = REFERENCE(ids_1T)[0].log_softmax(-1)
    own_T = logprobs_TV[:-1].gather(1, ids_1T[0, 1:, None])[:, 0]
    return [0.0, *own_T.tolist()]


def test_groups_have_their_samples_in_order(pool: VerifierPool) -> None:
    groups = RolloutGenerator(engine(), TASK, pool, DRAWING).get_groups(5, [3, 1], version=7)
    assert [[rollout.key for rollout in group] for group in groups] == [
        [RolloutKey(5, prompt, sample) for sample in range(4)] for prompt in (3, 1)
    ]
    for group in groups:
        assert len({rollout.prompt for rollout in group}) == 1
        assert len({rollout.tokens for rollout in group}) > 1, "samples differ"
        for rollout in group:
            (turn,) = rollout.turns
            assert turn.version == 7
            assert rollout.versions == (7, 7)
            assert rollout.ending == ("length" if turn.finish == "length" else "finished")
            assert rollout.rewards[0].outcome == "ok"


def test_log_probabilities_are_those_of_one_pass_over_the_whole(pool: VerifierPool) -> None:
    groups = RolloutGenerator(engine(), Calls(), pool, TURNS).get_groups(0, range(3), version=0)
    for group in groups:
        for rollout in group:
            for mine, again, drawn in zip(
                rollout.logprobs, told_again(rollout), rollout.loss_mask, strict=True
            ):
                assert mine == (pytest.approx(again, abs=1e-5) if drawn else 0.0)


def test_draws_depend_on_their_key_alone(pool: VerifierPool) -> None:
    wanted = draws(
        RolloutGenerator(engine(), TASK, pool, DRAWING).get_groups(2, range(6), version=0)
    )
    few = engine(max_num_seqs=2, max_num_batched_tokens=8)
    assert draws(RolloutGenerator(few, TASK, pool, DRAWING).get_groups(2, range(6), 0)) == wanted
    used = RolloutGenerator(engine(), TASK, pool, DRAWING)
    apart = [draws(used.get_groups(2, [prompt], 0)) for prompt in reversed(range(6))]
    assert [tokens for group in reversed(apart) for tokens in group] == wanted
    other = draws(
        RolloutGenerator(engine(), TASK, pool, DRAWING).get_groups(3, range(6), version=0)
    )
    assert other != wanted


def test_seeds_differ_by_every_part_of_a_key() -> None:
    places = [(0, 0, 0, 0, 0), (1, 0, 0, 0, 0), (0, 1, 0, 0, 0), (0, 0, 1, 0, 0), (0, 0, 0, 1, 0)]
    places += [(0, 0, 0, 0, 1), (0, 1, 11, 1, 0), (0, 11, 1, 1, 0)]
    seeds = {derive_turn_seed(run, RolloutKey(*key), turn) for run, *key, turn in places}
    assert len(seeds) == len(places)
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert derive_turn_seed(0, RolloutKey(0, 0, 0)) == 463590903587166154, (
        "old recordings can be drawn again"
    )


def test_each_turn_extends_the_last_and_only_drawn_tokens_are_trained_on(
    pool: VerifierPool,
) -> None:
    (group,) = RolloutGenerator(engine(), Calls(), pool, TURNS).get_groups(0, [4], version=0)
    for rollout in group:
        assert [turn.observation for turn in rollout.turns] == [(13, 1, 13), (13, 2, 13), ()]
        assert len({turn.seed for turn in rollout.turns}) == 3
        assert rollout.tokens[:3] == rollout.prompt == (12, 4, 10)
        trained = [t for t, on in zip(rollout.tokens, rollout.loss_mask, strict=True) if on]
        assert trained == [token for turn in rollout.turns for token in turn.tokens]
        assert rollout.sampled_token_count == len(trained)
        assert all(turn.cached_tokens > 0 for turn in rollout.turns[1:]), "its own blocks"
        last = sum(rollout.turns[-1].tokens)
        assert [part.name for part in rollout.rewards] == ["call", "call", "sum"]
        assert rollout.reward == 0.5 + 2 * last
        assert [one.start_s <= two.start_s for one, two in pairwise(rollout.turns)] == [True] * 2


def test_turns_and_length_end_what_the_environment_would_go_on_with(pool: VerifierPool) -> None:
    short = msgspec.structs.replace(TURNS, max_turns=2, stop_token_ids=tuple(range(14)))
    (group,) = RolloutGenerator(engine(), Calls(), pool, short).get_groups(0, [0], version=0)
    assert {(rollout.ending, len(rollout.turns)) for rollout in group} == {("max_turns", 2)}
    long = msgspec.structs.replace(TURNS, max_tokens=61)
    (group,) = RolloutGenerator(engine(), Calls(), pool, long).get_groups(0, [0], version=0)
    assert {(rollout.ending, len(rollout.turns)) for rollout in group} == {("length", 1)}


class _Endless:
    """Says three tokens to every turn, and never ends."""

    name, verifiers, may_block, prompt = "endless", (), False, (1, 2)

    def reset(self, prompt: int, /) -> "_Endless":  # noqa: ARG002
        return self

    def step(self, turn: RolloutTurn, /) -> EnvironmentStep:  # noqa: ARG002
        return EnvironmentStep(observation=(3, 4, 5))


@pytest.mark.parametrize("tokens", range(1, 6))
def test_no_rollout_is_longer_than_the_context(pool: VerifierPool, tokens: int) -> None:
    drawing = RolloutConfig(group_size=2, max_tokens=tokens, max_turns=100)
    used = engine()
    (group,) = RolloutGenerator(used, _Endless(), pool, drawing).get_groups(0, [0], version=0)
    assert {rollout.ending for rollout in group} == {"length"}
    assert all(len(rollout.tokens) <= used.max_model_len for rollout in group)
    assert all(rollout.turns[-1].observation == () for rollout in group)


class _Long(_Endless):
    prompt = tuple(range(10)) * 7  # type: ignore[assignment]


def test_a_prompt_that_leaves_no_room_is_told_as_that(pool: VerifierPool) -> None:
    drawing = RolloutConfig(group_size=1, max_tokens=2)
    ((rollout,),) = RolloutGenerator(engine(), _Long(), pool, drawing).get_groups(0, [0], version=0)
    assert rollout.ending == "error"
    assert rollout.error == "its prompt has 70 tokens, and the context holds 64"


def test_a_run_says_once_that_episodes_ended_without_a_reward(pool: VerifierPool) -> None:
    drawing = RolloutConfig(group_size=2, max_tokens=2, stop_token_ids=tuple(range(14)))
    (group,) = RolloutGenerator(engine(), _Endless(), pool, drawing).get_groups(0, [0], version=0)
    said: list[str] = []
    watching = VerifierFailureMonitor(0, said.append)
    for rollout in group:
        watching.observe(rollout)
    (line,) = said
    assert "had not ended after 1 turn and gave no reward" in line
    assert "raise max_turns" in line


class _Hangs:
    name, verifiers, may_block = "stuck", (), True

    def __init__(self) -> None:
        self.prompt, self.released = (1, 2), threading.Event()

    def reset(self, prompt: int, /) -> "_Hangs":  # noqa: ARG002
        return self

    def step(self, turn: RolloutTurn, /) -> EnvironmentStep:  # noqa: ARG002
        self.released.wait()
        return EnvironmentStep(done=True)


def test_an_environment_that_hangs_is_named_and_the_engine_is_left_idle(
    pool: VerifierPool,
) -> None:
    drawing = RolloutConfig(group_size=1, max_tokens=2, environment_timeout_s=0.05)
    hanging, used = _Hangs(), engine()
    with pytest.raises(
        EnvironmentFailureError, match=r"stuck .* deadline of 0.05 s: step 5, prompt 9"
    ):
        RolloutGenerator(used, hanging, pool, drawing).get_groups(4, [9], version=0)
    hanging.released.set()
    assert used.is_idle
    assert used.scheduler.block_pool.used_block_count == 0


class _Fails(_Hangs):
    may_block = False

    def step(self, turn: RolloutTurn, /) -> EnvironmentStep:  # noqa: ARG002
        raise KeyError("no such tool")


def test_an_environment_that_fails_is_named(pool: VerifierPool) -> None:
    with pytest.raises(EnvironmentFailureError, match=r"step 1, prompt 1, sample 0: KeyError"):
        RolloutGenerator(engine(), _Fails(), pool, DRAWING).get_groups(0, [1], version=0)


def test_breaking_off_leaves_the_engine_idle(pool: VerifierPool) -> None:
    drawer = engine(max_num_seqs=2)
    generator = RolloutGenerator(drawer, TASK, pool, DRAWING)
    drawing = generator.generate_rollouts(generator.build_keys(0, range(5)), version=0)
    next(drawing)
    drawing.close()  # type: ignore[attr-defined]
    assert drawer.is_idle
    assert drawer.scheduler.block_pool.used_block_count == 0


def test_temperatures_whose_chances_nobody_tells_are_refused() -> None:
    with pytest.raises(InputError, match="use 1 for training, 0 for evaluation"):
        RolloutConfig(temperature=0.7)


def test_a_key_is_drawn_once(pool: VerifierPool) -> None:
    generator = RolloutGenerator(engine(), TASK, pool, DRAWING)
    with pytest.raises(InputError, match="1 of 2 stand there twice"):
        list(generator.generate_rollouts([RolloutKey(0, 0, 0)] * 2, version=0))


def test_a_reply_that_goes_on_has_to_say_something() -> None:
    with pytest.raises(InputError, match="says nothing that the model could answer"):
        EnvironmentStep()


def test_what_is_under_way_goes_on_with_renewed_weights(pool: VerifierPool) -> None:
    """Tokens stay as they were drawn, and each has the log-probability of who drew it."""
    served, old, new = engine(), decoder(), decoder()
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.add_(0.05)
    generator = RolloutGenerator(served, TASK, pool, RolloutConfig(group_size=4, max_tokens=8))
    stream, found = RolloutStream(generator), list[Rollout]()
    stream.submit(generator.build_keys(0, [0, 1]), version=4)
    for _ in range(4):
        found += stream.run_step()

    def write() -> None:
        with torch.no_grad():
            mine = served.runner.model.decoder.parameters()
            for one, other in zip(mine, new.parameters(), strict=True):
                one.copy_(other)
        served.reset_prefix_cache()

    assert not found
    stream.update_weights(5, write)
    while stream.is_busy:
        found += stream.run_step()
    assert len(found) == 8
    for rollout in found:
        (turn,) = rollout.turns
        ((place, version),) = turn.weight_updates
        assert (turn.version, version, rollout.versions) == (4, 5, (4, 5))
        assert 0 < place < 8 == len(turn.tokens)
        ids = torch.tensor([rollout.tokens])
        with torch.no_grad():
            both = [each(ids)[0, :-1].log_softmax(-1) for each in (old, new)]
        begin = len(rollout.prompt) - 1
        right = torch.cat((both[0][: begin + place], both[1][begin + place :]))
        right = right.gather(1, ids[0, 1:, None])[begin:, 0]
        torch.testing.assert_close(torch.tensor(turn.logprobs), right, atol=1e-5, rtol=0)
