"""`LoRAConfig`: how an adapter is made, in the words that PEFT's settings also have.

`AdapterConfig` are those of it that a run's file gives.

y = W x + b + s · B A x          s = alpha / rank, or alpha / √rank
(Hu et al. 2021, arXiv 2106.09685; Kalajdzievski 2023, arXiv 2312.03732)
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

import msgspec

from meshwright.errors import Problem
from meshwright.spec.field_checks import FieldChecker, raise_problems

ALL_LINEAR = "all-linear"
PEFT_SPELLINGS = {
    "r": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "use_rslora": "rslora",
    "use_dora": "dora",
}
"""Fields of an `[adapter]` that PEFT spells otherwise: both spellings are accepted."""

_Number = TypeVar("_Number", int, float)


class LoRAConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which linear layers of a decoder get an adapter, and of which kind."""

    rank: int = 8
    alpha: float = 8.0
    """What the product is multiplied by, before it is divided by the rank."""
    rslora: bool = False
    """Divide by the rank's root in place of the rank."""
    dora: bool = False
    """Learn the length of each row of W + s · B A by itself (Liu et al. 2024, arXiv 2402.09353)."""
    dropout: float = 0.0
    """Share of A's inputs that are left out in training."""
    target_modules: tuple[str, ...] | str = ALL_LINEAR
    """Ends of modules' names as transformers has them, such as ("q_proj", "v_proj"); one text is a
    regular expression of whole names, but for "all-linear"."""
    init: Literal["uniform", "gaussian"] = "uniform"
    """What A is drawn from: ±1/√inputs, or a deviation of 1/rank. B starts from nought."""
    rank_pattern: Mapping[str, int] = msgspec.field(default_factory=dict)
    """Other ranks of some modules, by the end of their names (a regular expression)."""
    alpha_pattern: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Other alphas of some modules, likewise."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(rank=self.rank)
        if not self.alpha > 0 or not math.isfinite(self.alpha):
            bounds.add("alpha", f"{self.alpha} would add nothing", "use a number above 0")
        if not 0 <= self.dropout < 1:
            bounds.add("dropout", f"{self.dropout} is no share", "use 0 or more, but less than 1")
        if not self.target_modules:
            bounds.add("target_modules", "names no module", f"use {ALL_LINEAR}, or name one")
        if isinstance(self.target_modules, str):
            try:
                re.compile(self.target_modules)
            except re.error as error:
                what = f"{self.target_modules!r} is no regular expression: {error}"
                bounds.add("target_modules", what, f"use {ALL_LINEAR}, or such as q_proj,v_proj")
        for name, rank in self.rank_pattern.items():
            if rank < 1:
                bounds.add(f"rank_pattern.{name}", f"{rank} is no rank", "use 1 or more")
        bounds.raise_problems()

    def rank_of(self, module: str) -> int:
        """Return the rank of one module's adapter."""
        return _own(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return what B A of one module is multiplied by."""
        rank, alpha = self.rank_of(module), _own(self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.rslora else rank)

    def targets_module(self, module: str) -> bool:
        """Tell whether a linear layer gets an adapter."""
        if isinstance(self.target_modules, str):
            return self.target_modules == ALL_LINEAR or bool(
                re.fullmatch(self.target_modules, module)
            )
        return any(_ends(module, each) for each in self.target_modules)

    def unmatched_targets(self, modules: Iterable[str]) -> list[str]:
        """Return the targets that choose none of a model's linear layers."""
        known = list(modules)
        if isinstance(self.target_modules, str):
            return [] if any(map(self.targets_module, known)) else [self.target_modules]
        return [
            each for each in self.target_modules if not any(_ends(name, each) for name in known)
        ]


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is trained beside frozen weights; files may have PEFT's spellings of the fields too."""

    rank: int = 16
    """Rank of the matrices."""
    alpha: float = 32.0
    """What their product is multiplied by, before it is divided by the rank."""
    rslora: bool = False
    """Divide by the rank's root in place of the rank."""
    dora: bool = False
    """Learn the lengths of rows too."""
    dropout: float = 0.0
    """Share of the inputs that are left out in training."""
    target_modules: tuple[str, ...] | str = ALL_LINEAR
    """Ends of modules' names, a regular expression of whole names, or `all-linear`."""

    def __post_init__(self) -> None:
        self.to_lora_config()

    def to_lora_config(self) -> LoRAConfig:
        """Return the same as adapters take it."""
        return LoRAConfig(
            rank=self.rank,
            alpha=self.alpha,
            rslora=self.rslora,
            dora=self.dora,
            dropout=self.dropout,
            target_modules=self.target_modules,
        )


def rename_peft_fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose `[adapter]` has our names for the fields that PEFT spells otherwise.

    Raises:
        InputError: where a field is given in both spellings.
    """
    adapter = data.get("adapter")
    if not isinstance(adapter, Mapping):
        return dict(data)
    raise_problems(
        Problem(f"adapter.{peft}", f"is PEFT's name of {name}, and both are given", "give one")
        for peft, name in PEFT_SPELLINGS.items()
        if peft in adapter and name in adapter
    )
    renamed = {PEFT_SPELLINGS.get(name, name): value for name, value in adapter.items()}
    return {**data, "adapter": renamed}


def split_target_list(data: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a command line, where a shell leaves a list of targets as one text.

    So is one word by itself: as a regular expression it would be no whole name.
    """
    adapter = data.get("adapter")
    text = adapter.get("target_modules") if isinstance(adapter, Mapping) else None
    if not isinstance(adapter, Mapping) or not isinstance(text, str):
        return data
    if "," not in text and not re.fullmatch(r"\w+|\[\w+\]", text):
        return data
    words = [word.strip() for word in text.strip("[]").split(",")]
    return {**data, "adapter": {**adapter, "target_modules": words}}


def _ends(module: str, target: str) -> bool:
    return module == target or module.endswith(f".{target}")


def _own(patterns: Mapping[str, _Number], module: str, otherwise: _Number) -> _Number:
    for pattern, value in patterns.items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            return value
    return otherwise


def to_peft_config(
    settings: LoRAConfig, adapted: Iterable[str], others: Iterable[str]
) -> dict[str, Any]:
    """Return PEFT's settings of an adapter of some modules; `others` are a model's other ones.

    The ends of names say what is adapted, as PEFT writes them, and whole names where a module that
    is not adapted ends alike.
    """
    unlike = {name.rpartition(".")[2] for name in others}
    ends = {(name, name.rpartition(".")[2]) for name in adapted}
    targets = sorted({name if end in unlike else end for name, end in ends})
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": _whole(settings.alpha),
        "lora_dropout": settings.dropout,
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "init_lora_weights": "gaussian" if settings.init == "gaussian" else True,
        "target_modules": targets,
        "rank_pattern": dict(settings.rank_pattern),
        "alpha_pattern": {name: _whole(alpha) for name, alpha in settings.alpha_pattern.items()},
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }


def from_peft_config(config: Mapping[str, Any]) -> LoRAConfig:
    """Return the settings that a configuration of PEFT's says, as far as they matter here."""
    targets = config.get("target_modules") or ALL_LINEAR
    return LoRAConfig(
        rank=config.get("r", 8),
        alpha=float(config.get("lora_alpha", 8)),
        rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
        dropout=float(config.get("lora_dropout") or 0.0),
        target_modules=targets if isinstance(targets, str) else tuple(sorted(targets)),
        init="gaussian" if config.get("init_lora_weights") == "gaussian" else "uniform",
        rank_pattern=dict(config.get("rank_pattern") or {}),
        alpha_pattern={
            name: float(own) for name, own in (config.get("alpha_pattern") or {}).items()
        },
    )


def _whole(number: float) -> float | int:
    return int(number) if number == int(number) else number
