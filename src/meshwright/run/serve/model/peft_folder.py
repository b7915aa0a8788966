"""A folder of PEFT's: the low-rank matrices of an adapter by the module that they change.

Only safetensors are read; what is more than A and B of linear layers is refused by name.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from meshwright.errors import InputError, Problem

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


class LowRank(NamedTuple):
    """What an adapter adds to one module: scale · B A."""

    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[outputs, rank]"""
    scale: float


def short_name(module: str) -> str:
    """Return a module's name from its layer on: what stands before differs between versions."""
    found = re.search(r"\w+\.\d+\..+", module)
    return module if found is None else found[0]


def read_adapter(folder: str | Path, most: int) -> dict[str, LowRank]:
    """Return what an adapter adds to every module that it changes; `most` is the highest rank."""
    config = _config(Path(folder) / "adapter_config.json")
    path = Path(folder) / "adapter_model.safetensors"
    try:
        tensors = load_file(path)
    except FileNotFoundError as error:
        fix = "save the adapter with safe_serialization=True"
        raise InputError([Problem(str(path), "there is no such file", fix)]) from error
    except (SafetensorError, OSError) as error:
        what = f"is not a whole safetensors file: {error}"
        raise InputError([Problem(str(path), what, "fetch it again")]) from error
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            what = f"holds {name}, which is no A or B of a linear layer"
            fix = "use an adapter of linear layers alone, without DoRA and saved modules"
            raise InputError([Problem(str(path), what, fix)])
        halves.setdefault(short_name(match[1]), {})[match[2]] = tensor
    found = {}
    for module, pair in halves.items():
        if pair.keys() != {"A", "B"} or len(pair["A"]) != pair["B"].shape[1]:
            what = f"A and B of {module} do not fit each other"
            raise InputError([Problem(str(path), what, "fetch it again")])
        if len(pair["A"]) > most:
            what = f"{module} has rank {len(pair['A'])}, but adapters have room for {most}"
            raise InputError([Problem(str(path), what, "make room for a higher rank")])
        found[module] = LowRank(pair["A"], pair["B"], _scale(config, module, len(pair["A"])))
    return found


def _config(path: Path) -> dict[str, Any]:
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
    if config.get("use_dora"):
        what = "weights are scaled anew for every adapter"
        problems.append(Problem(f"{path}: use_dora", what, "use an adapter without"))
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
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)
