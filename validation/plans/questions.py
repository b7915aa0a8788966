"""Published runs as questions for the planner: rows that ask for the same are asked once."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

import meshwright
from meshwright.predict.plan import LayoutSpace, PlanQuestion
from meshwright.predict.plan.question.layout_space import FIXED_BY_USER
from meshwright.predict.validation.training.run_score import PreparedRun, prepare_run
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.workload import TrainingWorkload

RUNS = Path(__file__).parents[1] / "training" / "runs.json"

_LAYOUT = ("recompute", "zero", "microbatch", "activations")
"""How assumptions about a layout begin; chunks per rank begin with their number."""


class Published(NamedTuple):
    """A layout that somebody ran, and what the planner is to beat."""

    id: str
    source: str
    gpu: str
    measured_step_s: float
    assumed: tuple[str, ...]
    layout: Layout
    question: PlanQuestion

    @property
    def full(self) -> bool:
        """Whether the source gives the whole layout."""
        return not any(
            text.startswith(_LAYOUT) or "chunks per rank" in text for text in self.assumed
        )


class Group(NamedTuple):
    """Layouts that answer the same question."""

    key: str
    """The same for the same question and the same code."""
    question: PlanQuestion
    rows: tuple[Published, ...]

    @property
    def full(self) -> bool:
        """Whether any of its sources gives the whole layout."""
        return any(row.full for row in self.rows)


def published(row: Mapping[str, Any]) -> Published | None:
    """Read a row as a question with the layout that answered it, or None where it cannot be."""
    ready = prepare_run(row)
    if ready is None:
        return None
    work, training = ready.job, ready.job.workload
    assert isinstance(training, TrainingWorkload)
    model = _long_enough(work.model, training)
    layout = _own_operations(ready, model)
    question = PlanQuestion(
        model=model,
        cluster=work.cluster,
        workload=training,
        space=LayoutSpace(base=Layout(**{name: getattr(layout, name) for name in FIXED_BY_USER})),
        framework=ready.framework,
    )
    return Published(
        str(row["id"]), ready.source, str(row["gpu"]), ready.measured_step_s, ready.assumed,
        layout, question,
    )  # fmt: skip


def _long_enough(model: Model, training: TrainingWorkload) -> Model:
    """Give a model as many learned positions as its run used; rows do not say how many it had."""
    if model.positions != "learned" or training.sequence_length <= model.max_positions:
        return model
    return replace(model, max_positions=training.sequence_length)


def _own_operations(ready: PreparedRun, model: Model) -> Layout:
    """Leave out recompute of operations that a model does not have, which recipes name as well."""
    layout = ready.job.layout
    problems = replace(ready.job, model=model).check()
    lacks = [problem.fix for problem in problems if problem.where == "recompute_ops"]
    ops = tuple(op for op in layout.recompute_ops if f"leave {op} out" not in lacks)
    if ops or not layout.recompute_ops:
        return replace(layout, recompute_ops=ops)
    return replace(layout, recompute="none", recompute_ops=())


def groups(rows: Iterable[Published | None]) -> list[Group]:
    """Put rows that ask the same together, those with whole layouts first, else mixed well.

    The first few are a fair sample of all, whatever the order of the rows.
    """
    found: dict[str, list[Published]] = {}
    code = code_digest()
    for row in rows:
        if row is not None:
            asked = msgspec.json.encode(row.question)
            found.setdefault(hashlib.sha256(code + asked).hexdigest()[:16], []).append(row)
    every = [Group(key, some[0].question, tuple(some)) for key, some in found.items()]
    return sorted(every, key=lambda group: (not group.full, group.key))


def code_digest() -> bytes:
    """Return what changes with anything that could change an answer."""
    package, digest = Path(meshwright.__file__).parent, hashlib.sha256()
    for room in ("spec", "policy", "predict"):
        for path in sorted((package / room).rglob("*")):
            if path.suffix in {".py", ".toml", ".json"}:
                digest.update(path.read_bytes())
    return digest.digest()
