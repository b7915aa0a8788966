"""Files of recipes as works: what `mw train --recipe` trains, for those who predict it.

A step is one of `mw train` with the recipe's sequences; frozen weights have no gradients. What is
computed once, before the first step, is no part of it: log-probabilities of a reference. Neither is
what KTO computes for its baseline, nor the lengths that DoRA learns.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.errors import InputError, Problem
from meshwright.spec.job_spec import SECTIONS, TRAINER_SECTIONS, read_model
from meshwright.spec.serialization import encode

DEFAULT_BATCH, DEFAULT_SEQUENCE_LENGTH, DEFAULT_ADAPTER_RANK = 16, 2048, 16
"""What recipes take where nobody says: sequences of a step, their positions, an adapter's rank."""
_ADAPTED = ("lora", "dora")
_TARGETS = {
    "q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "qkv_proj": "qkv", "o_proj": "out",
    "gate_proj": "up", "up_proj": "up", "gate_up_proj": "up", "down_proj": "down",
}  # fmt: skip


def work_from_recipe(path: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a work that a recipe's file stands for."""
    from meshwright.run.posttrain.lora.lora_config import rename_peft_fields

    data = rename_peft_fields(data)
    recipe = data["recipe"]
    kind = recipe.get("kind") if isinstance(recipe, Mapping) else recipe
    if kind == "grpo":
        what = "is a loop of engine and trainer"
        raise InputError([Problem(path, what, f"use mw simulate rl {path}")])
    found = {name: data[name] for name in (*SECTIONS, *TRAINER_SECTIONS) if name in data}
    if "model" not in found:
        found["model"] = _start(path, data)
    workload = dict(data.get("workload") or {})
    workload.setdefault("global_batch", DEFAULT_BATCH)
    if "sequence_length" not in workload:
        model = read_model(found["model"], "model")
        workload["sequence_length"] = min(
            DEFAULT_SEQUENCE_LENGTH, model.max_positions or DEFAULT_SEQUENCE_LENGTH
        )
    if "adapter" in data or kind in _ADAPTED:
        workload["adapter"] = adapter_to_data(data.get("adapter") or {})
    return {**found, "workload": workload}


def _start(path: str, data: Mapping[str, Any]) -> object:
    """Return the model whose weights the run begins with."""
    start = data.get("initial_load_path")
    if not isinstance(start, str):
        fix = "set initial_load_path to a model's folder or GGUF file, or name a model"
        raise InputError([Problem("initial_load_path", "is missing", fix)])
    where = Path(path).parent / start
    if where.suffix == ".gguf":
        from meshwright.run.serve.model.gguf_file import GgufFile
        from meshwright.run.serve.model.gguf_weights import model_from_gguf

        with GgufFile(str(where)) as file:
            return encode(model_from_gguf(file))
    return str(where) if where.is_dir() else start


def adapter_to_data(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an adapter of a recipe as a workload has it; targets that it has no word for raise."""
    found: dict[str, Any] = {"rank": given.get("rank", DEFAULT_ADAPTER_RANK)}
    targets = given.get("target_modules", "all-linear")
    if targets == "all-linear":
        return found
    words = [targets] if isinstance(targets, str) else list(targets)
    unknown = [word for word in words if word not in _TARGETS]
    if unknown:
        what = f"{unknown[0]!r} is no matrix that a prediction knows"
        fix = f"use all-linear, or some of {', '.join(_TARGETS)}"
        raise InputError([Problem("adapter.target_modules", what, fix)])
    return {**found, "targets": list(dict.fromkeys(_TARGETS[word] for word in words))}
