"""Files of recipes are predicted as the steps that they train."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.cli.recipe_work import BATCH, LENGTH, RANK, work_of
from meshwright.errors import InputError

Captured = pytest.CaptureFixture[str]
FILE = """
model = "llama3.1-8b"
cluster = "h100-superpod"
epochs = 2

[recipe]
kind = "{kind}"

[chats]
train = "answers"

[data]
sources = ["chats.jsonl"]
"""


def simulated(path: Path, kind: str, capsys: Captured) -> dict[str, Any]:
    path.write_text(FILE.format(kind=kind), encoding="utf-8")
    main(["simulate", str(path), "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_an_adapter_needs_less_memory_and_time(tmp_path: Path, capsys: Captured) -> None:
    whole = simulated(tmp_path / "sft.toml", "sft", capsys)
    beside = simulated(tmp_path / "lora.toml", "lora", capsys)
    assert beside["step_s"] < 0.8 * whole["step_s"]
    assert beside["memory_bytes"] < 0.5 * whole["memory_bytes"]


def test_values_are_those_that_recipes_take() -> None:
    pytest.importorskip("torch", reason="reads recipes")
    from meshwright.run.posttrain.adapters.settings import AdapterSettings
    from meshwright.run.posttrain.supervised import job_file

    assert AdapterSettings().rank == RANK
    assert job_file.LENGTH == LENGTH
    assert job_file._defaults("sft", adapted=False)["workload"]["global_batch"] == BATCH


def test_targets_are_matrices() -> None:
    data = {"model": "llama3.1-8b", "recipe": {"kind": "dpo"},
            "adapter": {"rank": 4, "targets": ["q_proj", "v_proj", "down_proj"]}}  # fmt: skip
    adapter = work_of("job.toml", data)["workload"]["adapter"]
    assert adapter == {"rank": 4, "targets": ["qkv", "down"]}
    data["adapter"] = {"targets": ["lm_head"]}
    with pytest.raises(InputError, match="no matrix that a prediction knows"):
        work_of("job.toml", data)


def test_a_loop_is_sent_where_it_is_simulated() -> None:
    with pytest.raises(InputError, match=r"mw simulate rl loop\.toml"):
        work_of("loop.toml", {"recipe": {"kind": "grpo"}})
    with pytest.raises(InputError, match="start_from"):
        work_of("job.toml", {"recipe": {"kind": "sft"}})
