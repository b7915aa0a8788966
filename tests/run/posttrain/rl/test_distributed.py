"""A loop whose trainer is several ranks comes to what one device comes to, or is refused."""

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

pytest.importorskip("torch", reason="trains on gloo ranks")

import torch

from meshwright.errors import InputError
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.huggingface import save_hf_checkpoint
from meshwright.run.nn.weight_init import materialize
from meshwright.run.posttrain.rl import run_rl
from meshwright.run.posttrain.rl.config.rl_config import (
    ObjectiveConfig,
    RLConfig,
    TaskConfig,
    TinyModelConfig,
)
from meshwright.run.posttrain.rl.generation.rollout_backend import VerifierFailureError
from meshwright.run.posttrain.rollout.sorting_task.sorting_digits import SortingDigits
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.spec.layout import Layout
from meshwright.spec.model.huggingface import read_config
from tests.run.posttrain.rl import mishaps
from tests.run.posttrain.rl.rank_runs import Ran, first_of, on_ranks, weights_of
from tests.run.posttrain.rl.small import DIGITS, EVALUATED, settings

NEAR = 3e-4
"""How far weights may be from those of one device: Adam divides by gradients that are nearly 0."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas": {"dp": 2},
    "zero 3": {"dp": 2, "zero": 3},
    "tensors": {"tp": 2},
}
MORE: dict[str, dict[str, Any]] = {
    "zero 1": {"dp": 2, "zero": 1},
    "zero 2": {"dp": 2, "zero": 2},
    "recomputed": {"dp": 2, "recompute": "full"},
    "tensors and tokens": {"tp": 2, "sequence_parallel": True},
    "stages": {"pp": 2},
    "interleaved stages": {"pp": 2, "virtual_stages": 2, "schedule": "interleaved"},
    "mirrored stages": {"pp": 2, "schedule": "dualpipe"},
    "context": {"cp": 2},
    "context, heads traded": {"cp": 2, "cp_kind": "ulysses"},
    "shards of replicas": {"dp": 4, "shard": 2, "zero": 3},
    "tensors and replicas": {"tp": 2, "dp": 2, "zero": 3},
    "stages and replicas": {"pp": 2, "dp": 2, "zero": 3},
    "tensors and context": {"tp": 2, "cp": 2, "sequence_parallel": True},
    "tensors and stages": {"tp": 2, "pp": 2, "sequence_parallel": True},
}
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {"dp": 2, "ep": 2},
    "experts, zero 3": {"dp": 2, "ep": 2, "zero": 3},
    "experts and tensors": {"tp": 2, "ep": 2, "expert_tp": 1},
    "experts and context": {"cp": 2, "ep": 2},
}
AIMS: dict[str, dict[str, Any]] = {
    "pulled and corrected": {
        "kl_coef": 0.1, "importance_correction": "truncated", "minibatches": 2
    },
    "kl in the reward": {
        "adv_estimator": "whitened", "kl_coef": 0.05, "kl_in": "reward",
        "loss_agg_mode": "sequence",
    },
    "by sequence": {"loss": "gspo", "loss_agg_mode": "constant", "minibatches": 3},
    "with a critic": {"adv_estimator": "gae", "kl_coef": 0.1, "kl_in": "reward", "minibatches": 2},
}  # fmt: skip


def small(**given: Any) -> RLConfig:
    deep = TinyModelConfig(layers=4, hidden=16, heads=4, ffn=32)
    return settings(**{"network": deep, "microbatch_tokens": 60} | given)


@cache
def alone(about: str) -> tuple[Ran, dict[str, torch.Tensor]]:
    """Return what one device comes to, by what is asked of it."""
    folder = Path(mkdtemp())
    outcome = run_rl(small(folder=str(folder), **ASKED[about]))
    return Ran(outcome.step_metrics, outcome.notes, outcome.held_out_metrics), weights_of(folder)


@cache
def experts() -> str:
    """Return a folder with a model of digits whose tokens go to experts."""
    folder = mkdtemp()
    config = {
        "model_type": "qwen2_moe", "hidden_size": 32, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": 2, "decoder_sparse_step": 1, "max_position_embeddings": 64,
        "vocab_size": SortingDigits(digits=DIGITS).words.vocab,
    }  # fmt: skip
    decoder = build_decoder(read_config(config), dtype=torch.float32)
    materialize(decoder, "cpu", seed=0)
    save_hf_checkpoint(decoder, Path(folder))
    return folder


ASKED: dict[str, dict[str, Any]] = {
    "": {"evaluate": EVALUATED},
    **{name: {"objective": ObjectiveConfig(**aim)} for name, aim in AIMS.items()},
    "few": {
        "prompts_per_step": 2,
        "group_size": 3,
        "objective": ObjectiveConfig(loss_agg_mode="sequence", minibatches=5),
    },
}


def compare(
    folder: Path,
    layout: dict[str, Any],
    about: str = "",
    before: Callable[[int], object] | None = None,
) -> None:
    """Train on ranks, and hold that against one device."""
    chosen = Layout(**layout)
    given = small(folder=str(folder), layout=chosen, **ASKED[about])
    found = first_of(on_ranks(chosen.gpus, given, before=before))
    near(found, weights_of(folder), about)


def near(found: Ran, weights: dict[str, torch.Tensor], about: str = "") -> None:
    one, whole = alone(about)
    assert found.held_out == one.held_out
    for row, own in zip(one.rows, found.rows, strict=True):
        told = {name for name in row if not name.endswith("_s")}
        assert told <= set(own)
        # What engine and trainer differ by is rounding, here and there.
        for name in (each for each in told if not each.startswith("logprob_gap")):
            assert own[name] == pytest.approx(row[name], rel=1e-3, abs=1e-5), name
        assert own["logprob_gap_max"] < 1e-5
    for name, value in whole.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=NEAR)


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_come_to_the_rewards_and_weights_of_one_device(name: str, tmp_path: Path) -> None:
    compare(tmp_path, LAYOUTS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_so_they_do_under_every_layout(name: str, tmp_path: Path) -> None:
    compare(tmp_path, MORE[name])


@pytest.mark.slow
@pytest.mark.parametrize("about", AIMS)
@pytest.mark.parametrize("name", ["zero 3", "tensors and tokens", "stages", "context"])
def test_whatever_is_minimised_is_the_same(name: str, about: str, tmp_path: Path) -> None:
    compare(tmp_path, (LAYOUTS | MORE)[name], about)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_EXPERTS)
def test_experts_may_lie_on_several_ranks(name: str, tmp_path: Path) -> None:
    ASKED["experts"] = {
        "model": experts(),
        "objective": ObjectiveConfig(kl_coef=0.05, minibatches=2),
    }
    compare(tmp_path, OF_EXPERTS[name], "experts")


def test_replicas_may_have_fewer_answers_than_there_are_replicas(tmp_path: Path) -> None:
    compare(tmp_path, {"dp": 2, "zero": 3}, "few")


@pytest.mark.parametrize("mishap", [None, mishaps.verifiers_fail])
def test_a_run_leaves_no_weights_in_memory(
    mishap: Callable[[int], object] | None, tmp_path: Path
) -> None:
    told = partial(mishaps.tells_its_process, path=tmp_path / "process", then=mishap)
    on_ranks(2, small(folder=str(tmp_path / "run"), layout=Layout(dp=2)), before=told)
    process = (tmp_path / "process").read_text()
    assert not list(Path("/dev/shm").glob(f"meshwright-weights-{process}-*"))


def test_nobody_can_take_the_port_that_ranks_meet_at(tmp_path: Path) -> None:
    given = small(folder=str(tmp_path), layout=Layout(dp=2), steps=1)
    assert len(first_of(on_ranks(2, given, before=mishaps.wants_the_port)).rows) == 1


def test_ranks_of_other_machines_send_their_weights_to_the_first(tmp_path: Path) -> None:
    compare(tmp_path, {"tp": 2}, before=mishaps.is_far)


@pytest.mark.slow
def test_others_wait_for_rollouts_longer_than_for_one_another(tmp_path: Path) -> None:
    given = small(folder=str(tmp_path), layout=Layout(dp=2), steps=2, stall_timeout_s=1.5)
    assert len(first_of(on_ranks(2, given, before=mishaps.draws_long)).rows) == 2


def constant(folder: Path, **given: Any) -> RLConfig:
    """Return a run that may be made longer without a change to its learning rates."""
    rule = OptimizerConfig(lr=1e-2, schedule="constant", warmup_steps=0, weight_decay=0.0)
    return small(folder=str(folder), optimizer=rule, checkpoint_every_steps=1, **given)


@pytest.mark.parametrize(
    "aim", [{"minibatches": 2}, pytest.param({"adv_estimator": "gae"}, marks=pytest.mark.slow)]
)
def test_a_run_goes_on_under_other_layouts(aim: dict[str, Any], tmp_path: Path) -> None:
    objective = ObjectiveConfig(**aim)
    whole = run_rl(constant(tmp_path / "whole", steps=4, objective=objective))
    folder, sessions = tmp_path / "sessions", [Layout(dp=2, zero=3), Layout(tp=2)]
    found: list[dict[str, float]] = []
    for number, layout in enumerate(sessions):
        given = constant(folder, steps=1 + number, layout=layout, objective=objective)
        found += first_of(on_ranks(2, given)).rows
    found += run_rl(constant(folder, steps=4, objective=objective)).step_metrics
    assert [row["reward_mean"] for row in found] == [
        row["reward_mean"] for row in whole.step_metrics
    ]
    expected = weights_of(tmp_path / "whole")
    for name, value in weights_of(folder).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=NEAR)
    assert ("critic.model.value.weight" in expected) == (objective.adv_estimator == "gae")


def test_what_another_layout_loads_is_what_was_saved_bit_by_bit(tmp_path: Path) -> None:
    first_of(on_ranks(2, constant(tmp_path, steps=1, layout=Layout(dp=2, zero=3))))
    saved = weights_of(tmp_path)
    finished = run_rl(constant(tmp_path, steps=1))
    for name, value in finished.decoder.named_parameters():
        assert torch.equal(value, saved[f"model.{name}"])


@pytest.mark.slow
@pytest.mark.parametrize(("mishap", "who"), [(mishaps.dies_in_a_step, 1), (mishaps.first_dies, 0)])
def test_a_run_names_the_rank_that_died_and_goes_on(
    mishap: Callable[[int], object], who: int, tmp_path: Path
) -> None:
    given = small(folder=str(tmp_path), layout=Layout(dp=2), steps=4, checkpoint_every_steps=2)
    ended = on_ranks(2, given, before=mishap)
    assert [one.exit_code for one in ended][who] == -9
    assert ended[1 - who].exit_code == 4
    assert f"rank {who} " in (tmp_path / f"watchdog-rank-{1 - who:05d}.txt").read_text()
    found = first_of(on_ranks(2, given))
    assert found.notes[0] == "goes on after step 2"
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    again = tmp_path / "again"
    first_of(on_ranks(2, small(folder=str(again), layout=Layout(dp=2), steps=4)))
    for name, value in weights_of(again).items():
        assert torch.equal(weights_of(tmp_path)[name], value)


def test_all_ranks_end_with_an_error_of_the_first(tmp_path: Path) -> None:
    given = small(folder=str(tmp_path), layout=Layout(dp=2))
    first, other = on_ranks(2, given, before=mishaps.verifiers_fail)
    assert isinstance(first.error, VerifierFailureError)
    assert other.exit_code == 4
    assert "rank 0 " in (tmp_path / "watchdog-rank-00001.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("before", [None, mishaps.worker_dies])
def test_workers_draw_for_ranks_while_these_train(
    before: Callable[[int], object] | None, tmp_path: Path
) -> None:
    given = small(
        folder=str(tmp_path), layout=Layout(dp=2, zero=3), placement="async", steps=4,
        workers=WorkerConfig(num_workers=2),
    )  # fmt: skip
    found = first_of(on_ranks(2, given, before=before))
    assert [row["step"] for row in found.rows] == [1, 2, 3, 4]
    assert any("started anew" in note for note in found.notes) == (before is not None)
    gaps = [row["logprob_gap_max"] for row in found.rows if "logprob_gap_max" in row]
    assert gaps
    assert max(gaps) < 1e-5


@pytest.mark.slow
def test_ranks_learn_from_what_was_drawn_before(tmp_path: Path) -> None:
    one = run_rl(small(folder=str(tmp_path / "one")))
    given = small(
        folder=str(tmp_path / "two"),
        layout=Layout(tp=2),
        replay=str(tmp_path / "one" / "rollouts.jsonl"),
    )
    found = first_of(on_ranks(2, given))
    assert [row["reward_mean"] for row in found.rows] == [
        row["reward_mean"] for row in one.step_metrics
    ]
    expected = weights_of(tmp_path / "one")
    for name, value in weights_of(tmp_path / "two").items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=NEAR)


def test_all_ranks_are_refused_with_the_one_that_cannot_run(tmp_path: Path) -> None:
    given = settings(folder=str(tmp_path), layout=Layout(dp=2), task=TaskConfig(name="no:thing"))
    for one in on_ranks(2, given):
        assert isinstance(one.error, InputError)
        assert one.error.problems[0].where == "task.name"


def test_a_layout_of_more_ranks_than_were_started_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has 2 ranks, and 1 process was started"):
        run_rl(settings(folder=str(tmp_path / "run"), layout=Layout(dp=2)))
    assert not (tmp_path / "run").exists()


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"dp": 2}, {"placement": "colocated"}, "placement"),
    ({"dp": 2}, {"rollout_only": True}, "rollout_only"),
    ({"dp": 2}, {"device": "cuda:1"}, "device"),
    ({"precision": "fp32"}, {}, "layout.precision"),
    ({"microbatch": 4}, {}, "layout.microbatch"),
    ({"global_batch": 8}, {}, "layout.global_batch"),
    ({"optimizer": "muon"}, {}, "layout.optimizer"),
    ({"offload": ("optimizer",)}, {}, "layout.offload"),
]


@pytest.mark.parametrize(("layout", "given", "where"), REFUSED)
def test_what_ranks_cannot_do_is_refused(
    layout: dict[str, Any], given: dict[str, Any], where: str
) -> None:
    with pytest.raises(InputError) as refusal:
        settings(layout=Layout(**layout), **given)
    assert [each.where for each in refusal.value.problems] == [where]


def test_a_model_whose_heads_do_not_divide_is_refused() -> None:
    one_head = TinyModelConfig(layers=1, hidden=16, heads=1, ffn=32)
    outcomes = on_ranks(2, settings(layout=Layout(tp=2), network=one_head))
    for one in outcomes:
        assert isinstance(one.error, InputError)
        assert one.error.problems[0].where == "layout.tp"
