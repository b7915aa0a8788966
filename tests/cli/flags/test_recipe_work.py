"""Files of recipes are predicted as the steps that they train."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.cli.flags.recipe_work import (
    DEFAULT_ADAPTER_RANK,
    DEFAULT_BATCH,
    DEFAULT_SEQUENCE_LENGTH,
    work_from_recipe,
)
from meshwright.errors import InputError

Captured = pytest.CaptureFixture[str]
FILE = """
model = "llama3.1-8b"
cluster = "h100-superpod"
epochs = 2

[recipe]
kind = "{kind}"

[chats]
train_on = "assistant"

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
    from meshwright.run.posttrain.lora.lora_config import AdapterConfig
    from meshwright.run.posttrain.supervised import recipe_file

    assert AdapterConfig().rank == DEFAULT_ADAPTER_RANK
    assert recipe_file.DEFAULT_SEQUENCE_LENGTH == DEFAULT_SEQUENCE_LENGTH
    assert recipe_file._defaults("sft", adapted=False)["workload"]["global_batch"] == DEFAULT_BATCH


def test_targets_are_matrices() -> None:
    data = {
        "model": "llama3.1-8b",
        "recipe": {"kind": "dpo"},
        "adapter": {"rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    }
    adapter = work_from_recipe("job.toml", data)["workload"]["adapter"]
    assert adapter == {"rank": 4, "targets": ["qkv", "down"]}
    data["adapter"] = {"r": 2}
    assert work_from_recipe("job.toml", data)["workload"]["adapter"] == {"rank": 2}
    data["adapter"] = {"target_modules": ["lm_head"]}
    with pytest.raises(InputError, match="no matrix that a prediction knows"):
        work_from_recipe("job.toml", data)


def test_a_loop_is_sent_where_it_is_simulated() -> None:
    with pytest.raises(InputError, match=r"mw simulate rl loop\.toml"):
        work_from_recipe("loop.toml", {"recipe": {"kind": "grpo"}})
    with pytest.raises(InputError, match="initial_load_path"):
        work_from_recipe("job.toml", {"recipe": {"kind": "sft"}})
