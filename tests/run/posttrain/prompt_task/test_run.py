"""A run on prompts of a file: what it trains on, tells, goes on from and replays."""

import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.cli.train.rl_page import render_report
from meshwright.errors import InputError
from meshwright.run.posttrain.prompt_task.reward_config import (
    FormatReward,
    ModelReward,
    NumberReward,
    RewardConfig,
)
from meshwright.run.posttrain.rl import RLConfig, run_rl
from meshwright.run.posttrain.rl.config.rl_config import RLEvaluationConfig
from meshwright.run.posttrain.rl.run_state import RLRunState
from meshwright.run.posttrain.rl.task_loader import load_task
from meshwright.run.posttrain.rollout import read_rollouts
from meshwright.run.posttrain.rollout.rollout import Rollout
from meshwright.run.posttrain.rollout.verifiers.verifier_job import VerifierLimits
from meshwright.run.posttrain.supervised import RewardModel
from meshwright.run.posttrain.supervised.reward_model import save_reward_head
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.spec.layout import Layout
from tests.run.posttrain.prompt_task.small import liked, prompts_in, reward_folder, settings, task
from tests.run.posttrain.rl.rank_runs import first_of, on_ranks, weights_of
from tests.run.posttrain.rl.test_run import Enough, figures, same
from tests.run.posttrain.supervised.tiny import model_folder, write

SEVERAL: tuple[RewardConfig, ...] = (
    NumberReward(),
    FormatReward(pattern=".*[aeiou].*", name="vowel", weight=0.25),
    liked(weight=0.5, clip=3.0),
)


def asking(place: Path, /, *rewards: RewardConfig, **given: Any) -> RLConfig:
    return settings(task(prompts_in(place), rewards=rewards or SEVERAL), **given)


def drawn(folder: Path) -> tuple[Rollout, ...]:
    return read_rollouts(folder / "rollouts.jsonl").rollouts


def ended_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run end when the figures of a step are written."""
    written = RLRunState.write_metrics

    def row(self: RLRunState, trained: int, found: Any) -> None:
        written(self, trained, found)
        if trained == step:
            raise Enough

    monkeypatch.setattr(RLRunState, "write_metrics", row)


def test_a_run_tells_each_of_several_rewards_and_trains_on_their_sum(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    given = asking(tmp_path, folder=str(folder), evaluate=RLEvaluationConfig(num_prompts=4))
    outcome = run_rl(given)
    for row in outcome.step_metrics:
        parts = [row[f"reward_{name}_mean"] for name in ("number", "vowel", "liked")]
        weighted = parts[0] + 0.25 * parts[1] + 0.5 * parts[2]
        assert row["reward_mean"] == pytest.approx(weighted, abs=1e-6)
    assert outcome.step_metrics[0]["groups_without_signal"] == 0, (
        "scores of answers that differ, differ"
    )
    assert {"eval_reward_liked_mean", "eval_greedy_reward"} <= set(outcome.held_out_metrics[3])
    page = render_report(folder)
    assert "each reward, trained on" in page
    assert "% of the most" not in page, "a reward of 1 is not the most"
    assert "held out, sampled" in page


def test_scores_in_a_run_are_those_of_the_model_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_rl(asking(tmp_path, liked(), folder=str(folder), steps=1, group_size=16, max_tokens=16))
    model, rollouts = RewardModel.load(reward_folder()), drawn(folder)
    tail = load_task(asking(tmp_path, liked())).train.prompt_at(0).template_suffix  # type: ignore[attr-defined]
    wanted = [
        [*each.tokens, *(tail if each.turns[-1].tokens[-1] == 2 else ())] for each in rollouts
    ]
    assert [each.reward for each in rollouts] == model.score_completions(wanted)
    assert any(each.ending == "finished" for each in rollouts), "some ended by themselves"


def test_who_judged_stands_in_the_record(tmp_path: Path) -> None:
    folder, model = tmp_path / "run", tmp_path / "model"
    shutil.copytree(reward_folder(), model)
    given = asking(tmp_path, liked(model=str(model)), folder=str(folder), steps=1)
    first = run_rl(given)
    origin = read_rollouts(folder / "rollouts.jsonl").origin
    checksum = origin.fingerprints["reward model liked"]
    assert f"reward model liked has the checksum {checksum}" in first.notes
    assert {part.fingerprint for each in drawn(folder) for part in each.rewards} == {checksum}
    save_reward_head(torch.ones(1, 32), model)
    told = run_rl(msgspec.structs.replace(given, steps=2)).notes
    assert any("reward model liked: not as in earlier run sessions" in line for line in told)


def test_nothing_that_is_held_out_is_ever_trained_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    path = prompts_in(tmp_path, 20)
    given = settings(task(path, validation=0.25), folder=str(folder), steps=8, group_size=2)
    run_rl(msgspec.structs.replace(given, rollout_only=True))
    tasks: Any = load_task(given)
    held_out = {tasks.held_out.prompt_at(n).token_ids for n in range(len(tasks.held_out))}
    trained = [each.prompt for each in drawn(folder)]
    assert len(held_out) == 5
    assert len(set(trained)) == 15, "two passes asked all others"
    assert held_out.isdisjoint(trained)


@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_a_run_that_ended_goes_on_with_the_same_prompts_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    given = asking(tmp_path, checkpoint_every_steps=1, steps=4, placement=placement)
    whole = run_rl(given)
    here = msgspec.structs.replace(given, folder=str(tmp_path / "run"))
    ended_after(2, monkeypatch)
    with pytest.raises(Enough):
        run_rl(here)
    monkeypatch.undo()
    # From another folder, where the paths of its files are others.
    monkeypatch.chdir(tmp_path)
    moved = msgspec.structs.replace(here.task, train="train.jsonl")
    rest = run_rl(msgspec.structs.replace(here, task=moved))
    assert same(rest.decoder, whole.decoder)
    assert (
        figures(rest.step_metrics)[-1]["reward_liked_mean"]
        == whole.step_metrics[-1]["reward_liked_mean"]
    )


def test_what_was_drawn_trains_again_to_the_same_bits(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    recorded = run_rl(asking(tmp_path, folder=str(folder)))
    replayed = run_rl(asking(tmp_path, replay=str(folder / "rollouts.jsonl")))
    assert same(recorded.decoder, replayed.decoder)
    assert (
        replayed.step_metrics[-1]["reward_liked_mean"]
        == recorded.step_metrics[-1]["reward_liked_mean"]
    )


def test_drawing_alone_tells_each_reward(tmp_path: Path) -> None:
    outcome = run_rl(asking(tmp_path, folder=str(tmp_path / "run"), rollout_only=True, steps=1))
    assert {"reward_number_mean", "reward_vowel_mean"} <= set(outcome.step_metrics[0])


def test_other_prompts_are_another_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    given = asking(tmp_path, folder=str(folder), steps=1)
    run_rl(given)
    prompts_in(tmp_path, 30)
    before = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
    with pytest.raises(InputError, match=r"task: asks 'questions .*put its prompts and answers"):
        run_rl(msgspec.structs.replace(given, steps=2))
    after = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
    assert after == before, "it is refused before anything is written"
    replay = str(folder / "rollouts.jsonl")
    with pytest.raises(InputError, match="holds rollouts of another run: the task is 'questions"):
        run_rl(msgspec.structs.replace(given, replay=replay, folder=""))


def test_more_held_out_prompts_than_there_are_is_refused(tmp_path: Path) -> None:
    given = asking(tmp_path, evaluate=RLEvaluationConfig(num_prompts=5))
    with pytest.raises(InputError, match=r"evaluate.num_prompts: 5 are more than the 4 .*use 4"):
        run_rl(given)


def test_answers_without_room_for_a_prompt_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"max_tokens: 64 leave no room for a prompt"):
        run_rl(asking(tmp_path, max_tokens=64))


def test_a_tokenizer_with_more_words_than_the_model_is_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(model_folder(), model)
    config = model / "config.json"
    config.write_text(re.sub(r'"vocab_size": \d+', '"vocab_size": 40', config.read_text()))
    with pytest.raises(InputError, match=r"model: its tokenizer writes token \d+, and .* has 40"):
        load_task(asking(tmp_path, model=str(model)))


def test_questions_need_a_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="model: questions are texts"):
        run_rl(asking(tmp_path, model=""))


def test_programs_that_fail_by_their_limits_are_trained_on_as_wrong(tmp_path: Path) -> None:
    # What the model writes is a comment behind a program that never ends.
    record = {"prompt": "the", "prefix": "while True: pass\n#", "tests": "pass"}
    path = str(write(tmp_path / "train.jsonl", [record]))
    (row,) = run_rl(
        settings(
            task(path, validation=0.0),
            steps=1,
            prompts_per_step=1,
            group_size=2,
            max_pending_rewards=0,
            verifier=VerifierLimits(deadline_s=0.5),
        )
    ).step_metrics
    assert row["verifier_timeouts"] == 2
    assert (row["unscored"], row["reward_mean"]) == (0, 0)


def test_programs_have_a_process_each_unless_somebody_says_otherwise(tmp_path: Path) -> None:
    def each(records: list[dict[str, str]], **limits: Any) -> int:
        path = str(write(tmp_path / "train.jsonl", records))
        given = settings(task(path, validation=0.0), verifier=VerifierLimits(**limits))
        return load_task(given).get_verifier_limits(given).checks_per_process

    programs = [{"prompt": "the", "tests": "pass"}]
    assert each(programs) == 1
    assert each(programs, checks_per_process=5) == 5
    assert each([{"prompt": "the", "answer": "and"}]) == 0


def test_an_asynchronous_run_scores_beside_its_engine(tmp_path: Path) -> None:
    outcome = run_rl(asking(tmp_path, placement="async", steps=4))
    assert len(outcome.step_metrics) == 4
    assert all("reward_liked_mean" in row for row in outcome.step_metrics)


@pytest.mark.slow
def test_answers_of_workers_are_scored_by_the_trainers_process(tmp_path: Path) -> None:
    alone = run_rl(asking(tmp_path, steps=2))
    workers = run_rl(asking(tmp_path, steps=2, workers=WorkerConfig(num_workers=1)))
    assert same(alone.decoder, workers.decoder)


@pytest.mark.slow
def test_ranks_train_on_rewards_of_the_first(tmp_path: Path) -> None:
    alone = asking(tmp_path, steps=2, folder=str(tmp_path / "one"))
    run_rl(alone)
    layout = Layout(dp=2, zero=3)
    shared = msgspec.structs.replace(alone, folder=str(tmp_path / "two"), layout=layout)
    found = first_of(on_ranks(2, shared))
    assert "reward_liked_mean" in found.rows[-1]
    one, two = weights_of(tmp_path / "one"), weights_of(tmp_path / "two")
    for name, each in one.items():
        torch.testing.assert_close(two[name], each, atol=3e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "least"), [(liked(), 2.0), (FormatReward(pattern=".*[aeiou].*"), 0.1)]
)
def test_what_is_rewarded_is_learned_and_chance_is_not(
    tmp_path: Path, reward: RewardConfig, least: float
) -> None:
    def gain(**given: Any) -> float:
        rows = run_rl(
            asking(tmp_path, reward, steps=30, prompts_per_step=8, group_size=8, **given)
        ).step_metrics
        first, last = ([row["reward_mean"] for row in part] for part in (rows[:4], rows[-4:]))
        return sum(last) / 4 - sum(first) / 4

    learned = gain()
    assert learned > least
    assert gain(shuffle_rewards=True) < learned / 2


def test_a_share_of_the_most_is_told_where_there_is_one() -> None:
    both = (NumberReward(weight=0.5), FormatReward(pattern=".", weight=0.5))
    assert task("a").is_fractional_reward
    assert task("a", rewards=both).is_fractional_reward
    assert not task("a", rewards=SEVERAL).is_fractional_reward
    assert not task("a", rewards=(ModelReward(model="m"),)).is_fractional_reward
