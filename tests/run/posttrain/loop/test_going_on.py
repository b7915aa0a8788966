"""A run whose verifier failed goes on when it is well again, with the answers that are there."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="runs a model")

from meshwright.errors import InputError
from meshwright.policy.rollout.controller import Progress
from meshwright.run.posttrain.loop import run
from meshwright.run.posttrain.loop.keeping import Keeping, keys_of
from meshwright.run.posttrain.loop.sampling import VerifierFailing
from meshwright.run.posttrain.loop.settings import LoopSettings, TaskSettings, WarmUpSettings
from meshwright.run.posttrain.loop.trainer import LoopTrainer
from meshwright.run.posttrain.rollouts import (
    Drawing,
    Key,
    RewardPart,
    Rollout,
    Turn,
    read_rollouts,
)
from meshwright.run.posttrain.rollouts.log import Origin, RolloutLog
from tests.run.posttrain.loop.small import settings
from tests.run.posttrain.loop.test_run import Enough, figures, same

HERE = "tests.run.posttrain.loop.environments:judged"
NO_ANSWER = "none of 16 answers of step 2 was judged"


class Service:
    """A verifier that can be taken down."""

    def __init__(self, folder: Path) -> None:
        self._mark = folder / "down"

    def task(self, first: int = 0, bad: int = 1000) -> TaskSettings:
        """Let it judge so many prompts from the first on."""
        options = {"verifier": "serves", "first": first, "bad": bad, "down": str(self._mark)}
        return TaskSettings(name=HERE, options=options)

    def end(self) -> None:
        self._mark.touch()

    def start(self) -> None:
        self._mark.unlink()


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path)


def going(task: TaskSettings, **given: Any) -> LoopSettings:
    return settings(task=task, warm_up=WarmUpSettings(), **{"checkpoint_steps": 1, **given})


def after_row(monkeypatch: pytest.MonkeyPatch, step: int, what: Callable[[], object]) -> None:
    """Do something when a step's figures are written."""
    written = Keeping.row

    def row(self: Keeping, trained: int, found: Any) -> None:
        written(self, trained, found)
        if trained == step:
            what()

    monkeypatch.setattr(Keeping, "row", row)


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
        run(given)
    monkeypatch.undo()
    kept = [(each.key, each.turns) for each in drawn(folder)]
    with pytest.raises(InputError, match=NO_ANSWER):
        run(given)
    assert [(each.key, each.turns) for each in drawn(folder)] == kept, "nothing was drawn again"
    service.start()
    rest = run(given)
    assert [row["unjudged"] for row in rest.rows] == [0, 0]
    assert any("16 answers of an earlier sitting had not been judged" in n for n in rest.notes)
    assert [(each.key, each.turns) for each in drawn(folder)][: len(kept)] == kept
    assert all(each.is_judged for each in drawn(folder))
    whole = run(going(service.task()))
    assert same(rest.decoder, whole.decoder)
    replayed = run(going(service.task(), replay=str(folder / "rollouts.jsonl")))
    assert same(rest.decoder, replayed.decoder)


def test_a_run_that_too_many_failed_verdicts_ended_goes_on_without_any(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = going(service.task(), folder=str(tmp_path / "run"), most_unjudged=5)
    after_row(monkeypatch, 1, service.end)
    for _ in range(2):
        with pytest.raises(VerifierFailing, match="6 verdicts of one step failed, 5 may"):
            run(given)
    monkeypatch.undo()
    service.start()
    assert [row["unjudged"] for row in run(given).rows] == [0, 0]
    keys = [each.key for each in drawn(tmp_path / "run")]
    assert len(keys) == len(set(keys)) == 3 * 16


@pytest.mark.parametrize("most", [4, 3])
def test_verdicts_that_failed_stand_and_count_where_a_step_was_trained_without_them(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    service.end()
    given = going(service.task(bad=1), folder=str(tmp_path / "run"), checkpoint_steps=None)
    rows: list[dict[str, float]] = []
    written = Keeping.row

    def row(self: Keeping, trained: int, found: Any) -> None:
        written(self, trained, found)
        rows[:] = self.rows
        if trained == 2:
            raise Enough

    monkeypatch.setattr(Keeping, "row", row)
    with pytest.raises(Enough):
        run(given)
    monkeypatch.undo()
    service.start()
    given = msgspec.structs.replace(given, most_unjudged=most)
    if most < 4:
        with pytest.raises(VerifierFailing, match="4 verdicts of one step failed, 3 may"):
            run(given)
        return
    rest = run(given)
    assert [each["unjudged"] for each in rest.rows] == [4, 0, 0]
    learned = [
        [{name: row[name] for name in ("reward_mean", "grad_norm", "entropy")} for row in each]
        for each in (figures(tuple(rows)), figures(rest.rows[:2]))
    ]
    assert learned[0] == learned[1]


def test_prompts_to_spare_that_are_not_needed_any_more_are_asked_in_their_turn(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(folder: str) -> dict[Key, tuple[int, ...]]:
        return {each.key: each.versions for each in drawn(tmp_path / folder)}

    first, other = (
        going(service.task(first=4, bad=4), folder=str(tmp_path / name), spare_prompts=3, samples=8)
        for name in ("run", "whole")
    )
    whole = run(other)
    after_row(monkeypatch, 1, service.end)
    trained = LoopTrainer.step

    def step(self: LoopTrainer, number: int, groups: Any) -> dict[str, float]:
        if number == 1:
            raise Enough
        return trained(self, number, groups)

    monkeypatch.setattr(LoopTrainer, "step", step)
    with pytest.raises(Enough):
        run(msgspec.structs.replace(first, most_unjudged=32))
    monkeypatch.undo()
    early = [key for key, versions in asked("run").items() if asked("whole")[key] != versions]
    assert early, "prompts of the last step took the places of some that nobody judged"
    service.start()
    rest = run(first)
    assert asked("run") == asked("whole")
    assert same(rest.decoder, whole.decoder)


def test_drawing_alone_judges_all_of_it_again(service: Service, tmp_path: Path) -> None:
    service.end()
    given = going(
        service.task(first=2, bad=4), folder=str(tmp_path / "run"), rollout_only=True, steps=2
    )
    run(given)
    assert sum(not each.is_judged for each in drawn(tmp_path / "run")) == 16
    service.start()
    before = {each.key: each.turns for each in drawn(tmp_path / "run")}
    run(given)
    assert all(each.is_judged for each in drawn(tmp_path / "run"))
    assert {each.key: each.turns for each in drawn(tmp_path / "run")} == before


def test_an_asynchronous_run_asks_groups_anew_that_wait_without_verdicts(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = going(
        service.task(first=4, bad=4), folder=str(tmp_path / "run"), placement="asynchronous"
    )
    service.end()
    # Until then groups of the next step are there, and in the checkpoint.
    after_row(monkeypatch, 1, lambda: time.sleep(1.0))
    with pytest.raises(InputError, match=NO_ANSWER):
        run(given)
    monkeypatch.undo()
    service.start()
    assert [row["step"] for row in run(given).rows] == [2, 3]
    assert all(each.is_judged for each in drawn(tmp_path / "run"))


def test_groups_of_a_checkpoint_are_ready_only_as_it_knew_them_and_judged(tmp_path: Path) -> None:
    given = settings(folder=str(tmp_path), placement="asynchronous", samples=2)
    origin = Origin(environment="any", drawing=Drawing())

    def rollout(key: Key) -> Rollout:
        newer, failed = key.prompt == 6, key.prompt in (0, 5) and key.sample == 1
        turn = Turn(tokens=(1,), logprobs=(-1.0,), finish="stop", version=1 + newer, seed=0)
        part = RewardPart(name="it", value=1.0, outcome="error" if failed else "ok")
        return Rollout(key=key, prompt=(1,), turns=(turn,), rewards=(part,), ending="done")

    keys = [key for group in range(9) for key in keys_of(given, group)]
    with RolloutLog(tmp_path / "rollouts.jsonl", origin) as log:
        for key in keys:
            if (key.prompt, key.sample) != (7, 1):
                log.add(rollout(key))
    keeping = Keeping(given, lambda _: None)
    ready = tuple((group, 1) for group in (4, 5, 6, 7))
    progress = Progress(trained=1, unasked=9, again=(8,), ready=ready)
    found = keeping.open_log(origin, progress)
    keeping.close()
    assert found == Progress(trained=1, unasked=9, again=(5, 6, 7, 8), ready=((4, 1),))
    assert {each.key.prompt for each in drawn(tmp_path)} == {0, 1, 2, 3, 4}


def test_a_verifier_may_be_mended_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, folder = tmp_path / "mended_judges.py", tmp_path / "run"
    monkeypatch.syspath_prepend(tmp_path)
    task = TaskSettings(name=HERE, options={"verifier": "mended_judges:right", "bad": 1000})
    for steps, body in enumerate(["job['number']", "2.0 * job['number']"], 1):
        module.write_text(f"def right(job):\n    return float({body})\n")
        notes = run(going(task, folder=str(folder), steps=steps)).notes
        said = [line for line in notes if "verdicts from here on are of another verifier" in line]
        assert len(said) == steps - 1
        assert all(line.startswith("mended_judges:right: ") for line in said)
    assert not any(
        "another verifier" in n for n in run(going(task, folder=str(folder), steps=3)).notes
    )
    judged_by = {(each.key.step, each.rewards[0].fingerprint) for each in drawn(folder)}
    assert len(judged_by) == 3
    assert len({digest for _, digest in judged_by}) == 2
