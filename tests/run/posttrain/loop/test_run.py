"""The loop on real parts: what it tells, and the ways to the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.errors import InputError
from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.loop import run
from meshwright.run.posttrain.loop.keeping import Keeping
from meshwright.run.posttrain.loop.objective import CriticSettings
from meshwright.run.posttrain.loop.sampling import Sampling
from meshwright.run.posttrain.loop.settings import (
    ObjectiveSettings,
    TaskSettings,
    WarmUpSettings,
)
from meshwright.run.posttrain.loop.trainer import LoopTrainer
from meshwright.run.posttrain.rollouts import read_rollouts
from meshwright.run.posttrain.workers.settings import WorkerSettings
from meshwright.run.train.optimizer.settings import OptimizerSettings
from tests.run.posttrain.loop.small import EVALUATED, settings


def weights(decoder: Decoder) -> list[torch.Tensor]:
    return [each.detach().clone() for each in decoder.parameters()]


def same(one: Decoder, other: Decoder) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def figures(rows: tuple[dict[str, float], ...]) -> list[dict[str, float]]:
    """Return what does not hang on the clock."""
    return [{name: value for name, value in row.items() if not name.endswith("_s")} for row in rows]


def test_a_step_tells_what_a_person_needs() -> None:
    said: list[str] = []
    outcome = run(settings(evaluate=EVALUATED), say=said.append)
    assert outcome.steps == len(outcome.rows) == 3
    row = outcome.rows[0]
    wanted = """reward_mean reward_std groups silent_groups clip_share entropy ratio_min ratio_max
        logp_gap_mean logp_gap_max staleness_max length_mean length_p95 truncated_share grad_norm
        lr sampler_tokens_per_s trainer_tokens_per_s generate_s train_s sync_s unjudged"""
    assert not set(wanted.split()) - set(row)
    assert max(each["logp_gap_max"] for each in outcome.rows) <= 1e-5, "one model, two uses"
    assert set(outcome.held_out) == {0, 3}
    assert any("held out after 3 steps" in line for line in said)
    assert row["lr"] > outcome.rows[-1]["lr"]


@pytest.mark.parametrize(
    "other", [{"placement": "asynchronous", "max_staleness": 0}, {"placement": "colocated"}]
)
def test_other_placements_without_staleness_are_the_same_bit_by_bit(other: dict[str, Any]) -> None:
    plain = run(settings())
    driven = run(settings(**other))
    assert same(plain.decoder, driven.decoder)
    for one, its in zip(figures(plain.rows), figures(driven.rows), strict=True):
        assert one == {name: its[name] for name in one}


def test_colocated_gives_memory_up_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def noted(home: Any, name: str) -> None:
        real = getattr(home, name)

        def call(*given: Any) -> Any:
            done.append(name)
            return real(*given)

        monkeypatch.setattr(home, name, call)

    for home, name in ((Sampling, "sleep"), (LoopTrainer, "step"), (Sampling, "take")):
        noted(home, name)
    outcome = run(settings(placement="colocated", steps=2))
    # Before the first weights come it sleeps too; the last ones are for the evaluation at the end.
    assert done == ["sleep", "take", *["sleep", "step", "take"] * 2]
    assert {"trainer: sleep", "trainer: wake weights", "engines: wait: memory"} <= set(
        outcome.seconds
    )


@pytest.mark.parametrize("placement", ["one-step-off", "asynchronous"])
def test_staleness_stays_within_its_bound(placement: str) -> None:
    outcome = run(settings(placement=placement, steps=5))
    stale = [row["staleness_max"] for row in outcome.rows]
    assert stale[0] == 0
    assert max(stale) == 1
    assert len(outcome.rows) == 5


def test_what_was_recorded_trains_to_the_same_bits(tmp_path: Path) -> None:
    recorded = run(settings(folder=str(tmp_path / "run")))
    replayed = run(settings(replay=str(tmp_path / "run" / "rollouts.jsonl")))
    assert same(recorded.decoder, replayed.decoder)
    with pytest.raises(InputError, match="other prompts"):
        run(settings(replay=str(tmp_path / "run" / "rollouts.jsonl"), prompts=2))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"seed": 5}, "seed is 0 there and 5 here"),
        ({"samples": 2}, "samples is 4 there and 2 here"),
        ({"task": TaskSettings(digits=5)}, "'sort 3 digits .train.' there and 'sort 5 digits"),
        ({"steps": 2}, r"holds 1 steps, and 2 are asked for .*use steps=1"),
    ],
)
def test_rollouts_of_another_run_are_not_replayed(
    other: dict[str, Any], said: str, tmp_path: Path
) -> None:
    given = {"steps": 1, "warm_up": WarmUpSettings()}
    run(settings(folder=str(tmp_path / "run"), rollout_only=True, **given))
    with pytest.raises(InputError, match=said):
        run(settings(replay=str(tmp_path / "run" / "rollouts.jsonl"), **given | other))


def test_workers_that_cannot_share_the_model_are_refused_before_anything(tmp_path: Path) -> None:
    workers = WorkerSettings(count=1, tp=3)
    with pytest.raises(InputError, match=r"workers\.tp: 3 does not divide the 2 attention heads"):
        run(settings(folder=str(tmp_path / "run"), workers=workers))
    assert not (tmp_path / "run").exists()


def test_drawing_alone_trains_nothing(tmp_path: Path) -> None:
    drawn = run(settings(folder=str(tmp_path / "run"), rollout_only=True))
    found = read_rollouts(tmp_path / "run" / "rollouts.jsonl").rollouts
    assert len(found) == 3 * 4 * 4
    assert {each.versions for each in found} == {(0, 0)}
    nothing = run(settings(steps=1))
    assert drawn.steps == 0
    assert not same(drawn.decoder, nothing.decoder)
    run(settings(replay=str(tmp_path / "run" / "rollouts.jsonl")))


def test_a_folder_says_what_happened(tmp_path: Path) -> None:
    from meshwright.timeline import read

    folder = tmp_path / "run"
    run(settings(folder=str(folder), evaluate=EVALUATED, placement="asynchronous"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    shown = [json.loads(line) for line in (folder / "transcripts.jsonl").read_text().splitlines()]
    assert [each["step"] for each in shown] == [0, 0, 3, 3]
    assert shown[0]["prompt"] == shown[2]["prompt"]
    names = set(read(folder / "timeline").strings("name").values)
    assert {"generate", "train", "sync", "groups", "step 1", "step 3"} <= names
    assert 'placement = "asynchronous"' in (folder / "config.toml").read_text()
    with pytest.raises(InputError, match="seed differ"):
        run(settings(folder=str(folder), placement="asynchronous", seed=1))
    kept = (folder / "transcripts.jsonl").read_text()
    run(settings(folder=str(folder), evaluate=EVALUATED, placement="asynchronous"))
    assert (folder / "transcripts.jsonl").read_text() == kept, "a finished run adds nothing"


@pytest.mark.parametrize("placement", ["disaggregated", "asynchronous"])
def test_a_run_that_has_ended_may_be_made_longer(tmp_path: Path, placement: str) -> None:
    steady = OptimizerSettings(lr=1e-2, schedule="constant", warmup_steps=0, decay=0.0)
    given: dict[str, Any] = {"placement": placement, "optimizer": steady}
    if placement == "asynchronous":
        given["max_staleness"] = 0
    run(settings(folder=str(tmp_path), steps=2, **given))
    longer = run(settings(folder=str(tmp_path), steps=4, **given))
    assert [row["step"] for row in longer.rows] == [3, 4]
    assert same(longer.decoder, run(settings(steps=4, **given)).decoder)
    with pytest.raises(InputError, match="steps differ"):
        run(settings(folder=str(tmp_path), steps=3, **given))


def test_what_changes_nothing_is_said_and_steps_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    idle = ObjectiveSettings(minibatches=2, kl_form="k3", discount=0.9, correction_most=3.0)
    given: dict[str, Any] = {"placement": "colocated", "graph_tokens": 64, "objective": idle}
    said = run(settings(critic=CriticSettings(lr=1e-3), **given), show=True).notes
    for word in ("critic", "discount", "correction_most", "kl_form", "graph_tokens"):
        assert any(word in line and "nothing to do" in line for line in said)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("step 1 of 3  reward ")
    assert lines[-1].startswith("step 3 of 3  reward ")
    assert not any("nothing to do" in line for line in run(settings()).notes)


def test_a_step_without_a_signal_is_said_in_words() -> None:
    said: list[str] = []
    task = TaskSettings(digits=12, reward="exact")
    run(settings(task=task, steps=1), say=said.append)
    assert any("this step carries no signal" in line for line in said)


def test_a_model_of_a_folder_is_trained_on_a_task_of_ones_own(tmp_path: Path) -> None:
    from meshwright.run.nn.attention import Attention
    from meshwright.run.nn.build import build
    from meshwright.run.nn.huggingface import save
    from meshwright.run.nn.initialise import materialise
    from meshwright.spec.model import decoder as model_of

    model = model_of("small", layers=1, hidden=32, heads=2, kv_heads=1, ffn=32, vocab=32)
    made = build(model, dtype=torch.float32)
    materialise(made, "cpu", seed=5)
    save(made, tmp_path / "model")
    here = "tests.run.posttrain.loop.environments:judged"
    task = TaskSettings(name=here, options={"verifier": "double", "bad": 0})
    given = settings(model=str(tmp_path / "model"), task=task, warm_up=WarmUpSettings(), steps=2,
                     precision="fp32")  # fmt: skip
    outcome = run(given)
    assert max(row["logp_gap_max"] for row in outcome.rows) <= 1e-5
    before, after = made.embedding.weight, outcome.decoder.embedding.weight.cpu()
    mixers = [each for each in outcome.decoder.modules() if isinstance(each, Attention)]
    assert all(each.varied for each in mixers), "no kernel plans for lengths of answers"
    assert not torch.equal(before, after)
    assert torch.allclose(before, after, atol=0.1)


def test_an_engine_in_fp8_takes_every_version_and_differs_from_the_trainer_by_its_rounding() -> (
    None
):
    def gap(**given: Any) -> float:
        rows = run(settings(precision="bf16", steps=2, **given)).rows
        return max(row["logp_gap_max"] for row in rows)

    assert 2 * gap() < gap(engine_weights="fp8") < 0.1


class Enough(Exception):
    """Ends a run."""


def test_a_run_goes_on_with_the_same_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = ObjectiveSettings(kl=0.5)
    whole = run(settings(objective=pulled, steps=4))
    folder = str(tmp_path / "run")

    def row(self: Keeping, step: int, found: Any) -> None:
        written(self, step, found)
        if step == 3:
            raise Enough

    written = Keeping.row
    monkeypatch.setattr(Keeping, "row", row)
    given = settings(objective=pulled, steps=4, folder=folder, checkpoint_steps=1)
    with pytest.raises(Enough):
        run(given)
    monkeypatch.undo()
    rest = run(given)
    assert [row["step"] for row in rest.rows] == [3, 4]
    assert same(whole.decoder, rest.decoder)
