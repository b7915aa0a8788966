"""A run goes on from its own file, from any folder, and with other settings where they may be."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.errors import InputError
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.huggingface import save_hf_checkpoint
from meshwright.run.nn.weight_init import materialize
from meshwright.run.posttrain.rl import run_rl, run_state
from meshwright.run.posttrain.rl.config.rl_config import (
    RLConfig,
    RLEvaluationConfig,
    TaskConfig,
    WarmupConfig,
)
from meshwright.run.posttrain.rl.run_state import RESUMABLE_CHANGES
from meshwright.run.posttrain.rollout.verifiers import VerifierLimits
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.spec.layout import Layout
from meshwright.spec.model import build_decoder_model
from tests.run.posttrain.rl.small import settings

HERE = "tests.run.posttrain.rl.environments:judged"
TASK = TaskConfig(name=HERE, options={"verifier": "double", "bad": 0})

CHANGES: dict[str, Any] = {
    "folder": "moved",
    "layout": Layout(recompute="full"),  # over ranks: test_ranks
    "threads": 2,
    "microbatch_tokens": 64,
    "max_num_seqs": 3,
    "cuda_graphs": False,
    "max_cudagraph_capture_size": 64,
    "verifier_workers": 2,
    "verifier": VerifierLimits(deadline_s=9.0),
    "environment_timeout_s": 120.0,
    "workers": WorkerConfig(num_workers=1),
    "max_pending_rewards": 1,
    "evaluate": RLEvaluationConfig(num_prompts=4),
    "checkpoint_every_steps": 2,
    "stall_timeout_s": 100.0,
}


def test_all_that_may_change_is_tried_here() -> None:
    assert set(CHANGES) == RESUMABLE_CHANGES


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RLConfig:
    """A run of two steps in a folder that is given as people give it."""
    monkeypatch.chdir(tmp_path)
    given = settings(
        task=TASK, warm_up=WarmupConfig(), folder="run", steps=2, checkpoint_every_steps=1
    )
    run_rl(given)
    return given


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_goes_on_with_another(name: str, begun: RLConfig) -> None:
    if name == "folder":
        Path("run").rename("moved")
    changed: dict[str, Any] = {name: CHANGES[name]}
    assert getattr(begun, name) != changed[name]
    outcome = run_rl(msgspec.structs.replace(begun, steps=3, **changed))
    assert [row["step"] for row in outcome.step_metrics] == [3]
    assert any("goes on after step 2" in line for line in outcome.notes)


def test_what_a_rollout_hangs_on_may_not_change(begun: RLConfig) -> None:
    with pytest.raises(InputError, match="max_tokens differ"):
        run_rl(msgspec.structs.replace(begun, steps=3, max_tokens=2))


def test_a_run_goes_on_from_its_own_file_and_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = build_decoder(
        build_decoder_model("small", layers=1, hidden=32, heads=2, kv_heads=1, ffn=32, vocab=32),
        dtype=torch.float32,
    )
    materialize(made, "cpu", seed=5)
    save_hf_checkpoint(made, tmp_path / "model")
    given = settings(
        task=TASK, warm_up=WarmupConfig(), model="model", folder=str(tmp_path / "run"), steps=1
    )
    run_rl(given)
    kept = msgspec.convert(tomllib.loads(Path("run/config.toml").read_text()), RLConfig)
    assert kept.model == str(tmp_path / "model")
    for steps, model in enumerate((kept.model, "model", "./model", "../model"), 2):
        if model == "../model":
            (tmp_path / "beside").mkdir()
            monkeypatch.chdir(tmp_path / "beside")
        longer = msgspec.structs.replace(kept, steps=steps, model=model)
        assert [row["step"] for row in run_rl(longer).step_metrics] == [steps]


def test_a_run_goes_on_that_was_begun_before_some_settings_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = run_state._kept

    def before(given: RLConfig) -> dict[str, Any]:
        found = now(given)
        newer = ("rewards", "train", "held_out", "fields", "shuffle")
        task = {name: value for name, value in found["task"].items() if name not in newer}
        return {name: value for name, value in found.items() if name != "adapter"} | {"task": task}

    given = settings(task=TASK, warm_up=WarmupConfig(), folder=str(tmp_path), steps=1)
    with monkeypatch.context() as older:
        older.setattr(run_state, "_kept", before)
        run_rl(given)
    longer = msgspec.structs.replace(given, steps=2)
    other = msgspec.structs.replace(TASK, options={"verifier": "double", "bad": 1})
    with pytest.raises(InputError, match="task differ"):
        run_rl(msgspec.structs.replace(longer, task=other))
    assert [row["step"] for row in run_rl(longer).step_metrics] == [2]
