"""`LayoutSpace`: allowed values of each layout field in a search, and the `--fix` parser."""

from collections.abc import Iterable
from typing import Any, get_args

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.field_docs import list_field_docs
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import AXIS_ORDERS, ScheduleKind
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.serialization import decode

FIXED_BY_USER = (
    "precision",
    "optimizer",
    "master_precision",
    "gradient_precision",
    "moment_precision",
    "global_batch",
)
"""Fields that change what is trained; a search leaves them alone unless told."""

FIXED_UNLESS_ALLOWED = (*FIXED_BY_USER, "offload")
"""Fields that stay as the question's own layout has them unless more is allowed. What goes to the
host is one of them: whether all of it has room there, and what else uses the links, is not known
(`predict.step.offload_time`)."""

SEARCHED_CHOICES: dict[str, tuple[Any, ...]] = {
    "sequence_parallel": (True, False),
    "cp_kind": ("ring", "allgather", "ulysses"),
    "schedule": get_args(ScheduleKind),
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "overlap_gradients": (True, False),
    "overlap_parameters": (True, False),
    "overlap_tp": (True, False),
    "overlap_pp": (True, False),
    "overlap_ep": (True, False),
    "order": tuple(sorted(AXIS_ORDERS)),
}
"""The choices of fields that take words or switches. `ring+ulysses` is left out: it is priced as a
ring. Fields that take numbers are open unless fixed: every number that divides."""


class LayoutSpace(msgspec.Struct, frozen=True, kw_only=True):
    """The layouts that may answer: `fixed` narrows fields down to some values."""

    base: Layout = Layout()
    """Where fields that no search decides are taken from."""
    fixed: dict[str, tuple[Any, ...]] = {}
    """Allowed values of some fields; those not named are open."""
    fit_scale_up_domain: bool = False
    """Whether tensor, context and expert parallel groups stay inside one scale-up domain."""
    max_memory: float = 1.0
    """Share of a GPU's memory that may be used."""

    def get_allowed(self, name: str) -> tuple[Any, ...] | None:
        """Return the values a field may take; None where every sound number may be tried."""
        if name in self.fixed:
            return self.fixed[name]
        if name in FIXED_UNLESS_ALLOWED:
            return (getattr(self.base, name),)
        return SEARCHED_CHOICES.get(name)

    def list_allowed(self, name: str, sound: Iterable[int]) -> list[int]:
        """Return those of some sound numbers that a field may take."""
        allowed = self.get_allowed(name)
        return [number for number in sound if allowed is None or number in allowed]


def parse_fixed_fields(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Read texts such as `tp=4,8` or `schedule=1f1b`, or say all that is wrong with them."""
    kinds = {field.name: field.kind for field in list_field_docs(Layout)}
    found: dict[str, tuple[Any, ...]] = {}
    problems: list[Problem] = []
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not values.strip():
            what = f"{text!r} does not fix a field"
            problems.append(Problem("--fix", what, "write it like tp=8 or tp=4,8"))
        elif name not in kinds:
            problems.append(build_unknown_name_problem("field of a layout", name, kinds, "--fix"))
        else:
            try:
                found[name] = _values(name, values)
                problems += _out_of_range(name, found[name])
            except InputError as error:
                problems += (p._replace(where=f"--fix {text}") for p in error.problems)
    if problems:
        raise InputError(problems)
    return found


_COUNTS = frozenset(
    {"tp", "cp", "pp", "dp", "ep", "expert_tp", "microbatch", "virtual_stages", "shard"}
)

_STAGES = range(4)


def _out_of_range(name: str, values: tuple[Any, ...]) -> list[Problem]:
    """Return what is wrong with numbers that no layout may have."""
    where = f"--fix {name}"
    if name == "zero":
        wrong = [value for value in values if value not in _STAGES]
        return [Problem(where, f"there is no ZeRO stage {one}", "use 0 to 3") for one in wrong]
    if name not in _COUNTS:
        return []
    wrong = [value for value in values if value is not None and value < 1]
    return [Problem(where, f"{one} is too few", "use 1 or more") for one in wrong]


_LISTS = frozenset({"stage_layers", "recompute_ops", "offload"})
"""Fields that are lists themselves: `+` joins the words of one value, commas part values."""


def _values(name: str, text: str) -> tuple[Any, ...]:
    found: list[Any] = []
    for word in (part.strip() for part in text.split(",")):
        value: Any = word
        if name == "shard" and word == "none":
            found.append(None)  # all replicas share one copy
            continue
        if name in _LISTS:
            value = [part for part in word.split("+") if part not in ("", "none")]
        elif word.lower() in ("on", "true", "yes", "off", "false", "no"):
            value = word.lower() in ("on", "true", "yes")
        found.append(_one(name, value))
    return tuple(dict.fromkeys(found))


def _one(name: str, value: Any) -> Any:
    """Read one value as the layout would, apart from what it needs beside it."""
    kind = next(field.kind for field in list_field_docs(Layout) if field.name == name)
    return decode(kind, value, name)
