"""A run whose verifier failed goes on when it is well again, with the answers that are there."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.errors import InputError
from meshwright.policy.rollout.controller import RolloutProgress
from meshwright.run.posttrain.rl import run_rl
from meshwright.run.posttrain.rl.config.rl_config import RLConfig, TaskConfig, WarmupConfig
from meshwright.run.posttrain.rl.generation.rollout_backend import VerifierFailureError
from meshwright.run.posttrain.rl.run_state import RLRunState, build_group_keys
from meshwright.run.posttrain.rl.trainer.rl_trainer import RLTrainer
from meshwright.run.posttrain.rollout import (
    RewardComponent,
    Rollout,
    RolloutConfig,
    RolloutKey,
    RolloutTurn,
    read_rollouts,
)
from meshwright.run.posttrain.rollout.rollout_log import RolloutLog, RolloutOrigin
from tests.run.posttrain.rl.small import settings
from tests.run.posttrain.rl.test_run import Enough, figures, same

HERE = "tests.run.posttrain.rl.environments:judged"
NO_ANSWER = "none of 16 answers of step 2 was judged"


class Service:
    """A verifier that can be taken down."""

    def __init__(self, folder: Path) -> None:
        self._mark = folder / "down"

    def task(self, first: int = 0, bad: int = 1000) -> TaskConfig:
        """Let it judge so many prompts from the first on."""
        options = {"verifier": "serves", "first": first, "bad": bad, "down": str(self._mark)}
        return TaskConfig(name=HERE, options=options)

    def end(self) -> None:
        self._mark.touch()

    def start(self) -> None:
        self._mark.unlink()


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def going(task: TaskConfig, **given: Any) -> RLConfig:
    return settings(task=task, warm_up=WarmupConfig(), **{"checkpoint_every_steps": 1, **given})


def after_row(monkeypatch: pytest.MonkeyPatch, step: int, what: Callable[[], object]) -> None:
    """Do something when a step's figures are written."""
    written = RLRunState.write_metrics

    def row(self: RLRunState, trained: int, found: Any) -> None:
        written(self, trained, found)
        if trained == step:
            what()

    monkeypatch.setattr(RLRunState, "write_metrics", row)


def drawn(folder: Path) -> tuple[Rollout, ...]:
    return read_rollouts(folder / "rollouts.jsonl").rollouts


@pytest.mark.parametrize("placement", ["disaggregated", "colocated"])
def test_answers_of_an_outage_are_judged_again_to_the_same_bits(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    folder = tmp_path / "run"
    given = going(service.task(), folder=str(folder), placement=placement)
    after_row(monkeypatch, 1, service.end)
    with pytest.raises(InputError, match=NO_ANSWER):
        run_rl(given)
    monkeypatch.undo()
    kept = [(each.key, each.turns) for each in drawn(folder)]
    with pytest.raises(InputError, match=NO_ANSWER):
        run_rl(given)
    assert [(each.key, each.turns) for each in drawn(folder)] == kept, "nothing was drawn again"
    service.start()
    rest = run_rl(given)
    assert [row["unscored"] for row in rest.step_metrics] == [0, 0]
    assert any("16 answers of an earlier run session had not been judged" in n for n in rest.notes)
    assert [(each.key, each.turns) for each in drawn(folder)][: len(kept)] == kept
    assert all(each.has_reward for each in drawn(folder))
    whole = run_rl(going(service.task()))
    assert same(rest.decoder, whole.decoder)
    replayed = run_rl(going(service.task(), replay=str(folder / "rollouts.jsonl")))
    assert same(rest.decoder, replayed.decoder)


def test_a_run_that_too_many_failed_verdicts_ended_goes_on_without_any(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = going(service.task(), folder=str(tmp_path / "run"), max_pending_rewards=5)
    after_row(monkeypatch, 1, service.end)
    for _ in range(2):
        with pytest.raises(VerifierFailureError, match="6 verdicts of one step failed, 5 may"):
            run_rl(given)
    monkeypatch.undo()
    service.start()
    assert [row["unscored"] for row in run_rl(given).step_metrics] == [0, 0]
    keys = [each.key for each in drawn(tmp_path / "run")]
    assert len(keys) == len(set(keys)) == 3 * 16


@pytest.mark.parametrize("most", [4, 3])
def test_verdicts_that_failed_stand_and_count_where_a_step_was_trained_without_them(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    service.end()
    given = going(service.task(bad=1), folder=str(tmp_path / "run"), checkpoint_every_steps=None)
    rows: list[dict[str, float]] = []
    written = RLRunState.write_metrics

    def row(self: RLRunState, trained: int, found: Any) -> None:
        written(self, trained, found)
        rows[:] = self.step_metrics
        if trained == 2:
            raise Enough

    monkeypatch.setattr(RLRunState, "write_metrics", row)
    with pytest.raises(Enough):
        run_rl(given)
    monkeypatch.undo()
    service.start()
    given = msgspec.structs.replace(given, max_pending_rewards=most)
    if most < 4:
        with pytest.raises(VerifierFailureError, match="4 verdicts of one step failed, 3 may"):
            run_rl(given)
        return
    rest = run_rl(given)
    assert [each["unscored"] for each in rest.step_metrics] == [4, 0, 0]
    learned = [
        [{name: row[name] for name in ("reward_mean", "grad_norm", "entropy")} for row in each]
        for each in (figures(tuple(rows)), figures(rest.step_metrics[:2]))
    ]
    assert learned[0] == learned[1]


def test_prompts_to_spare_that_are_not_needed_any_more_are_asked_in_their_turn(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(folder: str) -> dict[RolloutKey, tuple[int, ...]]:
        return {each.key: each.versions for each in drawn(tmp_path / folder)}

    first, other = (
        going(
            service.task(first=4, bad=4), folder=str(tmp_path / name), extra_prompts=3, group_size=8
        )
        for name in ("run", "whole")
    )
    whole = run_rl(other)
    after_row(monkeypatch, 1, service.end)
    trained = RLTrainer.step

    def step(self: RLTrainer, number: int, groups: Any) -> dict[str, float]:
        if number == 1:
            raise Enough
        return trained(self, number, groups)

    monkeypatch.setattr(RLTrainer, "step", step)
    with pytest.raises(Enough):
        run_rl(msgspec.structs.replace(first, max_pending_rewards=32))
    monkeypatch.undo()
    early = [key for key, versions in asked("run").items() if asked("whole")[key] != versions]
    assert early, "prompts of the last step took the places of some that nobody judged"
    service.start()
    rest = run_rl(first)
    assert asked("run") == asked("whole")
    assert same(rest.decoder, whole.decoder)


def test_drawing_alone_judges_all_of_it_again(service: Service, tmp_path: Path) -> None:
    service.end()
    given = going(
        service.task(first=2, bad=4), folder=str(tmp_path / "run"), rollout_only=True, steps=2
    )
    run_rl(given)
    assert sum(not each.has_reward for each in drawn(tmp_path / "run")) == 16
    service.start()
    before = {each.key: each.turns for each in drawn(tmp_path / "run")}
    run_rl(given)
    assert all(each.has_reward for each in drawn(tmp_path / "run"))
    assert {each.key: each.turns for each in drawn(tmp_path / "run")} == before


def test_an_asynchronous_run_asks_groups_anew_that_wait_without_verdicts(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = going(service.task(first=4, bad=4), folder=str(tmp_path / "run"), placement="async")
    service.end()
    # Until then groups of the next step are there, and in the checkpoint.
    after_row(monkeypatch, 1, lambda: time.sleep(1.0))
    with pytest.raises(InputError, match=NO_ANSWER):
        run_rl(given)
    monkeypatch.undo()
    service.start()
    assert [row["step"] for row in run_rl(given).step_metrics] == [2, 3]
    assert all(each.has_reward for each in drawn(tmp_path / "run"))


def test_groups_of_a_checkpoint_are_ready_only_as_it_knew_them_and_judged(tmp_path: Path) -> None:
    given = settings(folder=str(tmp_path), placement="async", group_size=2)
    origin = RolloutOrigin(environment="any", rollout_config=RolloutConfig())

    def rollout(key: RolloutKey) -> Rollout:
        newer, failed = key.prompt == 6, key.prompt in (0, 5) and key.sample == 1
        turn = RolloutTurn(tokens=(1,), logprobs=(-1.0,), finish="stop", version=1 + newer, seed=0)
        part = RewardComponent(name="it", value=1.0, outcome="error" if failed else "ok")
        return Rollout(key=key, prompt=(1,), turns=(turn,), rewards=(part,), ending="finished")

    keys = [key for group in range(9) for key in build_group_keys(given, group)]
    with RolloutLog(tmp_path / "rollouts.jsonl", origin) as log:
        for key in keys:
            if (key.prompt, key.sample) != (7, 1):
                log.add(rollout(key))
    keeping = RLRunState(given, lambda _: None)
    ready = tuple((group, 1) for group in (4, 5, 6, 7))
    progress = RolloutProgress(
        trained_steps=1, next_group=9, requeued_groups=(8,), ready_groups=ready
    )
    found = keeping.open_log(origin, progress)
    keeping.close()
    assert found == RolloutProgress(
        trained_steps=1, next_group=9, requeued_groups=(5, 6, 7, 8), ready_groups=((4, 1),)
    )
    assert {each.key.prompt for each in drawn(tmp_path)} == {0, 1, 2, 3, 4}


def test_a_verifier_may_be_mended_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, folder = tmp_path / "mended_judges.py", tmp_path / "run"
    monkeypatch.syspath_prepend(tmp_path)
    task = TaskConfig(name=HERE, options={"verifier": "mended_judges:right", "bad": 1000})
    for steps, body in enumerate(["job['number']", "2.0 * job['number']"], 1):
        module.write_text(f"def right(job):\n    return float({body})\n")
        notes = run_rl(going(task, folder=str(folder), steps=steps)).notes
        said = [line for line in notes if "verdicts from here on are of another verifier" in line]
        assert len(said) == steps - 1
        assert all(line.startswith("mended_judges:right: ") for line in said)
    assert not any(
        "another verifier" in n for n in run_rl(going(task, folder=str(folder), steps=3)).notes
    )
    judged_by = {(each.key.step, each.rewards[0].fingerprint) for each in drawn(folder)}
    assert len(judged_by) == 3
    assert len({digest for _, digest in judged_by}) == 2
