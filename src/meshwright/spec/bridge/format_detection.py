"""Which kind of settings a text or a table is, for the error about one given to the wrong bridge.

It looks at names only. A text that is of the right kind and wrong inside is not its business.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.spec.bridge.framework_config import UnreadKeys, flatten
from meshwright.spec.file_formats import parse
from meshwright.spec.layout.layout import Layout

MIN_KNOWN_SHARE = 0.25
"""Settings of which a smaller part belongs to the target are those of something else."""

_LONGEST = 200_000
"""Longer texts are not parsed only to word an error."""


class ConfigFormat(NamedTuple):
    """A kind of settings."""

    title: str
    """What people call it."""
    target: str
    """The bridge that reads it, empty where none does."""
    fix: str
    """What to do with it."""


def _read_by(title: str, target: str) -> ConfigFormat:
    return ConfigFormat(title, target, f"import it with --from {target}")


JOB_SPEC = ConfigFormat(
    "a Meshwright work file", "", "use it as it is: mw layout check FILE, mw layout export"
)
LAYOUT = ConfigFormat("a Meshwright layout", "", "use it as the [layout] of a work file")
MODEL = ConfigFormat("a Meshwright model", "", "use it as the model of a work file")
HUGGING_FACE = ConfigFormat(
    "a Hugging Face config.json", "", "name its path as the model of a work file"
)
MEGATRON = _read_by("a list of Megatron-LM flags", "megatron")
TORCHTITAN = _read_by("a torchtitan job file", "torchtitan")
DEEPSPEED = _read_by("a DeepSpeed configuration", "deepspeed")
NEMO = _read_by("a NeMo or Megatron-Bridge configuration", "nemo")
FSDP2 = _read_by("an FSDP2 snippet", "fsdp2")
ACCELERATE = _read_by("an Accelerate configuration", "fsdp2")

_FLAG = re.compile(r"(?<!\S)[\"']?--(?:[a-z]+-)*(?:model-parallel|micro-batch|global-batch)-size\b")
_TITAN_FLAG = re.compile(r"(?<!\S)--(?:parallelism|training)\.\w")
_SNIPPET = re.compile(r"\b(?:fully_shard|init_device_mesh)\s*\(")
_RECIPE_LINE = re.compile(r"(?m)^\s*\w+\.(?:model|train|trainer)\.[\w.]*parallel_size\s*=")

# Any of these names at the top of a table, or in it, tells the kind; the first that fits counts.
_TOP: tuple[tuple[ConfigFormat, frozenset[str]], ...] = (
    (DEEPSPEED, frozenset({"zero_optimization", "train_batch_size",
                           "train_micro_batch_size_per_gpu"})),
    (ACCELERATE, frozenset({"compute_environment", "distributed_type", "fsdp_config"})),
    (TORCHTITAN, frozenset({"parallelism", "activation_checkpoint"})),
    (NEMO, frozenset({"trainer", "exp_manager", "ddp", "mixed_precision", "comm_overlap"})),
    (HUGGING_FACE, frozenset({"architectures", "model_type"})),
    (FSDP2, frozenset({"mesh_dim_names", "reshard_after_forward"})),
)  # fmt: skip


def detect_format(given: str | Mapping[str, Any]) -> ConfigFormat | None:
    """Return what the text or table looks like, None where it looks like nothing known."""
    if isinstance(given, Mapping):
        return _kind_of_table(given)
    for pattern, kind in (
        (_SNIPPET, FSDP2), (_TITAN_FLAG, TORCHTITAN), (_RECIPE_LINE, NEMO), (_FLAG, MEGATRON),
    ):  # fmt: skip
        if pattern.search(given):
            return kind
    if len(given) > _LONGEST:
        return None
    for ending in (".json", ".toml", ".yaml"):
        try:
            data = parse(given, ending, "")
        except InputError:
            continue
        if isinstance(data, Mapping):
            return _kind_of_table(data)
    return None


def _kind_of_table(data: Mapping[str, Any]) -> ConfigFormat | None:
    names = {str(name) for name in data}
    if any(name.startswith("--") for name in names):
        return MEGATRON
    if isinstance(data.get("layout"), Mapping) or {"cluster", "model"} <= names:
        return JOB_SPEC
    if {"hidden", "vocab"} <= names:
        return MODEL
    top = names | {name.partition(".")[0] for name in names}
    for kind, signs in _TOP:
        if signs & top:
            return kind
    if any(name.endswith("model_parallel_size") for name in flatten(data)):
        return NEMO
    if len(names & set(Layout.__struct_fields__)) > 1:
        return LAYOUT
    return None


class ExpectedFormat(NamedTuple):
    """What a bridge asks for."""

    target: str
    """The bridge."""
    title: str
    """What its settings are called."""
    hint: str
    """What to give it."""


def build_format_error(given: str | Mapping[str, Any], wanted: ExpectedFormat) -> InputError:
    """Return the error that nothing in the text belongs to the target, and what the text is."""
    kind = detect_format(given)
    if kind is not None and kind.target != wanted.target:
        return InputError([Problem("", f"this is {kind.title}, not {wanted.title}", kind.fix)])
    return InputError([Problem("", f"there are no {wanted.title} in the text", wanted.hint)])


def require_flat(given: str | Mapping[str, Any], wanted: ExpectedFormat) -> None:
    """Refuse data with tables in them, for a target whose settings are one plain table."""
    if isinstance(given, Mapping) and any(isinstance(value, Mapping) for value in given.values()):
        raise build_format_error(given, wanted)


def require_known_keys(
    given: str | Mapping[str, Any], own: int, found: UnreadKeys, wanted: ExpectedFormat
) -> None:
    """Refuse settings of which next to none belong to the target; `own` counts those that do."""
    own += found.mistyped
    if not own or own < MIN_KNOWN_SHARE * (own + found.unknown):
        raise build_format_error(given, wanted)


def read_table(
    given: str | Mapping[str, Any], ending: str, where: str, wanted: ExpectedFormat
) -> Mapping[str, Any]:
    """Return a file's data; a file of another kind is named as such instead of as bad syntax."""
    if isinstance(given, Mapping):
        return given
    try:
        data = parse(given, ending, where)
    except InputError as error:
        kind = detect_format(given)
        if kind is not None and kind.target != wanted.target:
            raise build_format_error(given, wanted) from None
        raise InputError(
            problem._replace(fix=f"mend it, or {wanted.hint}") for problem in error.problems
        ) from None
    if not isinstance(data, Mapping) or not data:
        raise build_format_error(given, wanted)
    return data
