"""A folder of PEFT's: the low-rank matrices of an adapter by the module that they change.

Only safetensors are read; what is more than A, B and DoRA's magnitudes of linear layers is refused
by name.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.huggingface.safetensors_header import find_repeated_names

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A\.weight|B\.weight|magnitude_vector)")


class LoRALayerWeights(NamedTuple):
    """What an adapter adds to one module: scale · B A."""

    lora_a: Tensor
    """[rank, inputs]"""
    lora_b: Tensor
    """[outputs, rank]"""
    scaling: float
    magnitude: Tensor | None = None
    """[outputs], the lengths that DoRA gives to the rows; None without it."""


class PeftCheckpoint(NamedTuple):
    """What lies in a folder of PEFT's."""

    config: dict[str, Any]
    modules: dict[str, LoRALayerWeights]
    """By the short names of the modules."""


def strip_module_prefix(module: str) -> str:
    """Return a module's name from its layer on: what stands before differs between versions."""
    found = re.search(r"\w+\.\d+\..+", module)
    return module if found is None else found[0]


def uses_dora(folder: str | Path) -> bool:
    """Tell whether an adapter of a folder is of DoRA's kind."""
    return bool(_config(Path(folder) / "adapter_config.json", True).get("use_dora"))


def read_adapter(
    folder: str | Path, most: int, *, dora: bool = False
) -> dict[str, LoRALayerWeights]:
    """Return what an adapter adds to every module that it changes; `most` is the highest rank."""
    found = read_peft_checkpoint(folder, dora=dora).modules
    for module, each in found.items():
        if len(each.lora_a) > most:
            what = f"{module} has rank {len(each.lora_a)}, but adapters have room for {most}"
            raise InputError([Problem(str(folder), what, f"use max_lora_rank={len(each.lora_a)}")])
    return found


def read_peft_checkpoint(folder: str | Path, *, dora: bool = True) -> PeftCheckpoint:
    """Read an adapter with its settings; `dora` says whether one of this kind is wanted."""
    config = _config(Path(folder) / "adapter_config.json", dora)
    path = Path(folder) / "adapter_model.safetensors"
    try:
        tensors = load_file(path)
    except FileNotFoundError as error:
        fix = "save the adapter with safe_serialization=True"
        raise InputError([Problem(str(path), "there is no such file", fix)]) from error
    except (SafetensorError, OSError) as error:
        what = f"is not a whole safetensors file: {error}"
        raise InputError([Problem(str(path), what, "fetch it again")]) from error
    if (problem := find_repeated_names(path)) is not None:
        raise InputError([problem])
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            what = f"holds {name}, which is no A, B or magnitude of a linear layer"
            fix = "use an adapter of linear layers alone, without saved modules"
            raise InputError([Problem(str(path), what, fix)])
        parts.setdefault(match[1], {})[match[2]] = tensor
    wanted = {"A.weight", "B.weight"} | ({"magnitude_vector"} if config.get("use_dora") else set())
    found = {}
    for module, given in parts.items():
        if given.keys() != wanted or not _fits(**{name[0]: each for name, each in given.items()}):
            what = f"{', '.join(sorted(given))} of {module} do not fit each other"
            raise InputError([Problem(str(path), what, "fetch it again")])
        a, b = given["A.weight"], given["B.weight"]
        scale = _scale(config, module, len(a))
        found[strip_module_prefix(module)] = LoRALayerWeights(
            a, b, scale, given.get("magnitude_vector")
        )
    return PeftCheckpoint(config, found)


def _fits(A: Tensor, B: Tensor, m: Tensor | None = None) -> bool:
    if A.dim() != 2 or B.dim() != 2 or len(A) != B.shape[1]:
        return False
    return m is None or m.shape == B.shape[:1]


def _config(path: Path, dora: bool) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        what = "there is no such file"
        raise InputError([Problem(str(path), what, "name a folder of PEFT's")]) from error
    except ValueError as error:
        raise InputError([Problem(str(path), f"is no JSON: {error}", "fetch it again")]) from error
    problems = []
    if config.get("peft_type") != "LORA":
        what = f"{config.get('peft_type')!r} is no adapter that is known here"
        problems.append(Problem(f"{path}: peft_type", what, "use LORA"))
    if config.get("use_dora") and not dora:
        what = "weights are scaled anew for every adapter"
        fix = "make room for DoRA's lengths (dora=True), or use an adapter without"
        problems.append(Problem(f"{path}: use_dora", what, fix))
    if config.get("bias", "none") != "none":
        what = f"biases {config['bias']!r} are changed"
        problems.append(Problem(f"{path}: bias", what, "use an adapter with none"))
    if problems:
        raise InputError(problems)
    assert isinstance(config, dict)
    return config


def _scale(config: dict[str, Any], module: str, rank: int) -> float:
    """Return what an adapter's product is multiplied by: alpha / rank, or / √rank (rsLoRA)."""
    alpha = float(config.get("lora_alpha", 8))
    for pattern, own in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = float(own)
            break
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)
