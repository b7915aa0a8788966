"""The loop on real parts: what it tells, and the ways to the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.errors import InputError
from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.rl import run_rl
from meshwright.run.posttrain.rl.config.objective_config import CriticConfig
from meshwright.run.posttrain.rl.config.rl_config import ObjectiveConfig, TaskConfig, WarmupConfig
from meshwright.run.posttrain.rl.generation.rollout_backend import RolloutBackend
from meshwright.run.posttrain.rl.run_state import RLRunState
from meshwright.run.posttrain.rl.trainer.rl_trainer import RLTrainer
from meshwright.run.posttrain.rollout import read_rollouts
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from tests.run.posttrain.rl.small import EVALUATED, settings


def weights(decoder: Decoder) -> list[torch.Tensor]:
    return [each.detach().clone() for each in decoder.parameters()]


def same(one: Decoder, other: Decoder) -> bool:
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def figures(rows: tuple[dict[str, float], ...]) -> list[dict[str, float]]:
    """Return what does not hang on the clock."""
    return [{name: value for name, value in row.items() if not name.endswith("_s")} for row in rows]


def test_a_step_tells_what_a_person_needs() -> None:
    said: list[str] = []
    outcome = run_rl(settings(evaluate=EVALUATED), say=said.append)
    assert outcome.trained_steps == len(outcome.step_metrics) == 3
    row = outcome.step_metrics[0]
    wanted = """reward_mean reward_std groups groups_without_signal clip_fraction entropy ratio_min
        ratio_max logprob_gap_mean logprob_gap_max staleness_max length_mean length_p95
        truncated_fraction grad_norm lr sampler_tokens_per_s trainer_tokens_per_s generate_s
        train_s sync_s unscored"""
    assert not set(wanted.split()) - set(row)
    assert max(each["logprob_gap_max"] for each in outcome.step_metrics) <= 1e-5, (
        "one model, two uses"
    )
    assert set(outcome.held_out_metrics) == {0, 3}
    assert any("step 3 held-out reward" in line for line in said)
    assert row["lr"] > outcome.step_metrics[-1]["lr"]


@pytest.mark.parametrize(
    "other", [{"placement": "async", "max_staleness": 0}, {"placement": "colocated"}]
)
def test_other_placements_without_staleness_are_the_same_bit_by_bit(other: dict[str, Any]) -> None:
    plain = run_rl(settings())
    driven = run_rl(settings(**other))
    assert same(plain.decoder, driven.decoder)
    for one, its in zip(figures(plain.step_metrics), figures(driven.step_metrics), strict=True):
        assert one == {name: its[name] for name in one}


def test_colocated_gives_memory_up_while_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def noted(home: Any, name: str) -> None:
        real = getattr(home, name)

        def call(*given: Any) -> Any:
            done.append(name)
            return real(*given)

        monkeypatch.setattr(home, name, call)

    for home, name in (
        (RolloutBackend, "sleep"),
        (RLTrainer, "step"),
        (RolloutBackend, "load_weights"),
    ):
        noted(home, name)
    outcome = run_rl(settings(placement="colocated", steps=2))
    # Before the first weights come it sleeps too; the last ones are for the evaluation at the end.
    assert done == ["sleep", "load_weights", *["sleep", "step", "load_weights"] * 2]
    assert {"trainer: sleep", "trainer: wake weights", "engines: wait: memory"} <= set(
        outcome.duration_by_activity_s
    )


@pytest.mark.parametrize("placement", ["one_step_off", "async"])
def test_staleness_stays_within_its_bound(placement: str) -> None:
    outcome = run_rl(settings(placement=placement, steps=5))
    stale = [row["staleness_max"] for row in outcome.step_metrics]
    assert stale[0] == 0
    assert max(stale) == 1
    assert len(outcome.step_metrics) == 5


def test_what_was_recorded_trains_to_the_same_bits(tmp_path: Path) -> None:
    recorded = run_rl(settings(folder=str(tmp_path / "run")))
    replayed = run_rl(settings(replay=str(tmp_path / "run" / "rollouts.jsonl")))
    assert same(recorded.decoder, replayed.decoder)
    with pytest.raises(InputError, match="other prompts"):
        run_rl(settings(replay=str(tmp_path / "run" / "rollouts.jsonl"), prompts_per_step=2))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"seed": 5}, "seed is 0 there and 5 here"),
        ({"group_size": 2}, "group_size is 4 there and 2 here"),
        ({"task": TaskConfig(digits=5)}, "'sort 3 digits .train.' there and 'sort 5 digits"),
        ({"steps": 2}, r"holds 1 steps, and 2 are asked for .*use steps=1"),
    ],
)
def test_rollouts_of_another_run_are_not_replayed(
    other: dict[str, Any], said: str, tmp_path: Path
) -> None:
    given = {"steps": 1, "warm_up": WarmupConfig()}
    run_rl(settings(folder=str(tmp_path / "run"), rollout_only=True, **given))
    with pytest.raises(InputError, match=said):
        run_rl(settings(replay=str(tmp_path / "run" / "rollouts.jsonl"), **given | other))


def test_workers_that_cannot_share_the_model_are_refused_before_anything(tmp_path: Path) -> None:
    workers = WorkerConfig(num_workers=1, tensor_parallel_size=3)
    with pytest.raises(
        InputError, match=r"workers\.tensor_parallel_size: 3 does not divide the 2 attention heads"
    ):
        run_rl(settings(folder=str(tmp_path / "run"), workers=workers))
    assert not (tmp_path / "run").exists()


def test_drawing_alone_trains_nothing(tmp_path: Path) -> None:
    drawn = run_rl(settings(folder=str(tmp_path / "run"), rollout_only=True))
    found = read_rollouts(tmp_path / "run" / "rollouts.jsonl").rollouts
    assert len(found) == 3 * 4 * 4
    assert {each.versions for each in found} == {(0, 0)}
    nothing = run_rl(settings(steps=1))
    assert drawn.trained_steps == 0
    assert not same(drawn.decoder, nothing.decoder)
    run_rl(settings(replay=str(tmp_path / "run" / "rollouts.jsonl")))


def test_a_folder_says_what_happened(tmp_path: Path) -> None:
    from meshwright.timeline import read_timeline

    folder = tmp_path / "run"
    run_rl(settings(folder=str(folder), evaluate=EVALUATED, placement="async"))
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    shown = [json.loads(line) for line in (folder / "transcripts.jsonl").read_text().splitlines()]
    assert [each["step"] for each in shown] == [0, 0, 3, 3]
    assert shown[0]["prompt"] == shown[2]["prompt"]
    names = set(read_timeline(folder / "timeline").string_column("name").values)
    assert {"generate", "train", "sync", "groups", "step 1", "step 3"} <= names
    assert 'placement = "async"' in (folder / "config.toml").read_text()
    with pytest.raises(InputError, match="seed differ"):
        run_rl(settings(folder=str(folder), placement="async", seed=1))
    kept = (folder / "transcripts.jsonl").read_text()
    run_rl(settings(folder=str(folder), evaluate=EVALUATED, placement="async"))
    assert (folder / "transcripts.jsonl").read_text() == kept, "a finished run adds nothing"


@pytest.mark.parametrize("placement", ["disaggregated", "async"])
def test_a_run_that_has_ended_may_be_made_longer(tmp_path: Path, placement: str) -> None:
    steady = OptimizerConfig(lr=1e-2, schedule="constant", warmup_steps=0, weight_decay=0.0)
    given: dict[str, Any] = {"placement": placement, "optimizer": steady}
    if placement == "async":
        given["max_staleness"] = 0
    run_rl(settings(folder=str(tmp_path), steps=2, **given))
    longer = run_rl(settings(folder=str(tmp_path), steps=4, **given))
    assert [row["step"] for row in longer.step_metrics] == [3, 4]
    assert same(longer.decoder, run_rl(settings(steps=4, **given)).decoder)
    with pytest.raises(InputError, match="steps differ"):
        run_rl(settings(folder=str(tmp_path), steps=3, **given))


def test_what_changes_nothing_is_said_and_steps_are_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    idle = ObjectiveConfig(minibatches=2, kl_estimator="k3", gamma=0.9, correction_cap=3.0)
    given: dict[str, Any] = {
        "placement": "colocated",
        "max_cudagraph_capture_size": 64,
        "objective": idle,
    }
    said = run_rl(settings(critic=CriticConfig(lr=1e-3), **given), show=True).notes
    for word in ("critic", "gamma", "correction_cap", "kl_estimator", "max_cudagraph_capture_size"):
        assert any(word in line and "nothing to do" in line for line in said)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("step 1 of 3  reward ")
    assert lines[-1].startswith("step 3 of 3  reward ")
    assert not any("nothing to do" in line for line in run_rl(settings()).notes)


def test_a_step_without_a_signal_is_said_in_words() -> None:
    said: list[str] = []
    task = TaskConfig(digits=12, reward="exact")
    run_rl(settings(task=task, steps=1), say=said.append)
    assert any("this step carries no signal" in line for line in said)


def test_a_model_of_a_folder_is_trained_on_a_task_of_ones_own(tmp_path: Path) -> None:
    from meshwright.run.nn.attention.self_attention import SelfAttention
    from meshwright.run.nn.decoder_builder import build_decoder
    from meshwright.run.nn.huggingface import save_hf_checkpoint
    from meshwright.run.nn.weight_init import materialize
    from meshwright.spec.model import build_decoder_model

    model = build_decoder_model("small", layers=1, hidden=32, heads=2, kv_heads=1, ffn=32, vocab=32)
    made = build_decoder(model, dtype=torch.float32)
    materialize(made, "cpu", seed=5)
    save_hf_checkpoint(made, tmp_path / "model")
    here = "tests.run.posttrain.rl.environments:judged"
    task = TaskConfig(name=here, options={"verifier": "double", "bad": 0})
    given = settings(model=str(tmp_path / "model"), task=task, warm_up=WarmupConfig(), steps=2,
                     precision="fp32")  # fmt: skip
    outcome = run_rl(given)
    assert max(row["logprob_gap_max"] for row in outcome.step_metrics) <= 1e-5
    before, after = made.embedding.weight, outcome.decoder.embedding.weight.cpu()
    mixers = [each for each in outcome.decoder.modules() if isinstance(each, SelfAttention)]
    assert all(each.dynamic_shapes for each in mixers), "no kernel plans for lengths of answers"
    assert not torch.equal(before, after)
    assert torch.allclose(before, after, atol=0.1)


def test_an_engine_in_fp8_takes_every_version_and_differs_from_the_trainer_by_its_rounding() -> (
    None
):
    def gap(**given: Any) -> float:
        rows = run_rl(settings(precision="bf16", steps=2, **given)).step_metrics
        return max(row["logprob_gap_max"] for row in rows)

    assert 2 * gap() < gap(engine_weights="fp8") < 0.1


class Enough(Exception):
    """Ends a run."""


def test_a_run_goes_on_with_the_same_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = ObjectiveConfig(kl_coef=0.5)
    whole = run_rl(settings(objective=pulled, steps=4))
    folder = str(tmp_path / "run")

    def row(self: RLRunState, step: int, found: Any) -> None:
        written(self, step, found)
        if step == 3:
            raise Enough

    written = RLRunState.write_metrics
    monkeypatch.setattr(RLRunState, "write_metrics", row)
    given = settings(objective=pulled, steps=4, folder=folder, checkpoint_every_steps=1)
    with pytest.raises(Enough):
        run_rl(given)
    monkeypatch.undo()
    rest = run_rl(given)
    assert [row["step"] for row in rest.step_metrics] == [3, 4]
    assert same(whole.decoder, rest.decoder)
