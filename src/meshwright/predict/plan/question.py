"""`Question`: what a plan is asked for, and which layouts may answer it.

A `Space` says for every field of a `Layout` which values may be chosen. Fields that change results
and not just speed (precision, optimizer, formats of states) stay as the user's own layout has them
unless more is allowed, and so does what is kept in host memory.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import Any, get_args

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.cost import Calibration, DeviceCosts
from meshwright.predict.run import Run
from meshwright.predict.software import MEGATRON, Software
from meshwright.spec.cluster import Cluster
from meshwright.spec.fields import fields
from meshwright.spec.layout import Layout
from meshwright.spec.layout.kinds import ORDERS, Offload, ScheduleKind
from meshwright.spec.model import Model
from meshwright.spec.names import unknown_name
from meshwright.spec.read import read
from meshwright.spec.work import Work
from meshwright.spec.workload import Training

FIXED_BY_USER = (
    "precision",
    "optimizer",
    "master_precision",
    "gradient_precision",
    "moment_precision",
    "global_batch",
)
"""Fields that change what is trained; a search leaves them alone unless told."""

CLOSED = (*FIXED_BY_USER, "offload")
"""Fields that stay as the question's own layout has them unless more is allowed. What goes to the
host is one of them: whether all of it has room there, and what else uses the links, is not known
(`predict.offload`)."""

OFFLOADS: tuple[tuple[Offload, ...], ...] = (
    (),
    ("activations",),
    ("optimizer",),
    ("activations", "optimizer"),
    ("gradients", "optimizer"),
    ("activations", "gradients", "optimizer"),
    ("gradients", "optimizer", "parameters"),
    ("activations", "gradients", "optimizer", "parameters"),
)
"""What trainers keep in host memory together: what is updated there goes there first."""

_OPEN: dict[str, tuple[Any, ...]] = {
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
    "order": tuple(sorted(ORDERS)),
}
"""The choices of fields that take words or switches. `ring+ulysses` is left out: it is priced as a
ring. Fields that take numbers are open unless fixed: every number that divides."""


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """The layouts that may answer: `fixed` narrows fields down to some values."""

    base: Layout = Layout()
    """Where fields that no search decides are taken from."""
    fixed: dict[str, tuple[Any, ...]] = {}
    """Allowed values of some fields; those not named are open."""
    must_fit_node: bool = False
    """Whether tensor, context and expert parallel groups stay inside one scale-up domain."""
    max_memory: float = 1.0
    """Share of a GPU's memory that may be used."""

    def allowed(self, name: str) -> tuple[Any, ...] | None:
        """Return the values a field may take; None where every sound number may be tried."""
        if name in self.fixed:
            return self.fixed[name]
        if name in CLOSED:
            return (getattr(self.base, name),)
        return _OPEN.get(name)

    def numbers(self, name: str, sound: Iterable[int]) -> list[int]:
        """Return those of some sound numbers that a field may take."""
        allowed = self.allowed(name)
        return [number for number in sound if allowed is None or number in allowed]


def read_fixed(texts: Iterable[str]) -> dict[str, tuple[Any, ...]]:
    """Read texts such as `tp=4,8` or `schedule=1f1b`, or say all that is wrong with them."""
    kinds = {field.name: field.kind for field in fields(Layout)}
    found: dict[str, tuple[Any, ...]] = {}
    problems: list[Problem] = []
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not values.strip():
            what = f"{text!r} does not fix a field"
            problems.append(Problem("--fix", what, "write it like tp=8 or tp=4,8"))
        elif name not in kinds:
            problems.append(unknown_name("field of a layout", name, kinds, "--fix"))
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
    kind = next(field.kind for field in fields(Layout) if field.name == name)
    return read(kind, value, name)


class Question(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A model to train on some GPUs, and the layouts that may do it."""

    model: Model
    cluster: Cluster
    """As large as the run: all its GPUs are used."""
    workload: Training
    space: Space = Space()
    software: Software = MEGATRON
    calibration: Calibration | None = None
    """What was measured on the GPUs, in place of their default constants."""

    def __post_init__(self) -> None:
        share = self.space.max_memory
        if not 0 < share <= 1:
            what = f"{share} is not a share of a GPU's memory"
            raise InputError([Problem("max_memory", what, "use a number from 0 to 1, like 0.92")])

    @property
    def gpus(self) -> int:
        """GPUs of the run."""
        return self.cluster.gpus

    @cached_property
    def limited(self) -> Cluster:
        """The cluster with as much memory in each GPU as may be used."""
        if self.space.max_memory == 1:
            return self.cluster
        room = round(self.cluster.gpu.memory_bytes * self.space.max_memory)
        gpu = msgspec.structs.replace(self.cluster.gpu, memory_bytes=room)
        return msgspec.structs.replace(self.cluster, gpu=gpu)

    def work(self, layout: Layout) -> Work:
        """Return the work that a layout of this question does."""
        return Work(model=self.model, cluster=self.limited, layout=layout, workload=self.workload)

    def run(self, layout: Layout) -> Run:
        """Return one step of a layout as the cost functions see it."""
        run = Run(self.work(layout), software=self.software, calibration=self.calibration)
        run.__dict__["costs"] = self._costs  # the same for every layout of a question
        return run

    @cached_property
    def _costs(self) -> DeviceCosts:
        return Run(self.work(Layout()), software=self.software, calibration=self.calibration).costs
