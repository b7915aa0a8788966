"""A run goes on from its own file, from any folder, and with other settings where they may be."""

import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="runs a model")

import torch

from meshwright.errors import InputError
from meshwright.run.nn.build import build
from meshwright.run.nn.huggingface import save
from meshwright.run.nn.initialise import materialise
from meshwright.run.posttrain.loop import keeping, run
from meshwright.run.posttrain.loop.keeping import MAY_CHANGE
from meshwright.run.posttrain.loop.settings import (
    EvaluateSettings,
    LoopSettings,
    TaskSettings,
    WarmUpSettings,
)
from meshwright.run.posttrain.rollouts.verifiers import VerifierLimits
from meshwright.run.posttrain.workers.settings import WorkerSettings
from meshwright.spec.layout import Layout
from meshwright.spec.model import decoder as model_of
from tests.run.posttrain.loop.small import settings

HERE = "tests.run.posttrain.loop.environments:judged"
TASK = TaskSettings(name=HERE, options={"verifier": "double", "bad": 0})

CHANGES: dict[str, Any] = {
    "folder": "moved",
    "layout": Layout(recompute="full"),  # over ranks: test_ranks
    "threads": 2,
    "microbatch_tokens": 64,
    "batch_requests": 3,
    "graphs": False,
    "graph_tokens": 64,
    "verifier_workers": 2,
    "verifier": VerifierLimits(deadline_s=9.0),
    "environment_s": 120.0,
    "workers": WorkerSettings(count=1),
    "most_unjudged": 1,
    "evaluate": EvaluateSettings(prompts=4),
    "checkpoint_steps": 2,
    "stall_s": 100.0,
}


def test_all_that_may_change_is_tried_here() -> None:
    assert set(CHANGES) == MAY_CHANGE


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoopSettings:
    """A run of two steps in a folder that is given as people give it."""
    monkeypatch.chdir(tmp_path)
    given = settings(task=TASK, warm_up=WarmUpSettings(), folder="run", steps=2, checkpoint_steps=1)
    run(given)
    return given


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_goes_on_with_another(name: str, begun: LoopSettings) -> None:
    if name == "folder":
        Path("run").rename("moved")
    changed: dict[str, Any] = {name: CHANGES[name]}
    assert getattr(begun, name) != changed[name]
    outcome = run(msgspec.structs.replace(begun, steps=3, **changed))
    assert [row["step"] for row in outcome.rows] == [3]
    assert any("goes on after step 2" in line for line in outcome.notes)


def test_what_a_rollout_hangs_on_may_not_change(begun: LoopSettings) -> None:
    with pytest.raises(InputError, match="max_tokens differ"):
        run(msgspec.structs.replace(begun, steps=3, max_tokens=2))


def test_a_run_goes_on_from_its_own_file_and_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = build(
        model_of("small", layers=1, hidden=32, heads=2, kv_heads=1, ffn=32, vocab=32),
        dtype=torch.float32,
    )
    materialise(made, "cpu", seed=5)
    save(made, tmp_path / "model")
    given = settings(
        task=TASK, warm_up=WarmUpSettings(), model="model", folder=str(tmp_path / "run"), steps=1
    )
    run(given)
    kept = msgspec.convert(tomllib.loads(Path("run/config.toml").read_text()), LoopSettings)
    assert kept.model == str(tmp_path / "model")
    for steps, model in enumerate((kept.model, "model", "./model", "../model"), 2):
        if model == "../model":
            (tmp_path / "beside").mkdir()
            monkeypatch.chdir(tmp_path / "beside")
        longer = msgspec.structs.replace(kept, steps=steps, model=model)
        assert [row["step"] for row in run(longer).rows] == [steps]


def test_a_run_goes_on_that_was_begun_before_some_settings_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = keeping._kept

    def before(given: LoopSettings) -> dict[str, Any]:
        found = now(given)
        newer = ("rewards", "train", "held_out", "fields", "shuffle")
        task = {name: value for name, value in found["task"].items() if name not in newer}
        return {name: value for name, value in found.items() if name != "adapter"} | {"task": task}

    given = settings(task=TASK, warm_up=WarmUpSettings(), folder=str(tmp_path), steps=1)
    with monkeypatch.context() as older:
        older.setattr(keeping, "_kept", before)
        run(given)
    longer = msgspec.structs.replace(given, steps=2)
    other = msgspec.structs.replace(TASK, options={"verifier": "double", "bad": 1})
    with pytest.raises(InputError, match="task differ"):
        run(msgspec.structs.replace(longer, task=other))
    assert [row["step"] for row in run(longer).rows] == [2]
