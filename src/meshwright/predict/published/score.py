"""Score predictions against published runs: one result per row, none dropped."""

import json
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.predict.constants import CONSTANTS, StepConstants
from meshwright.predict.memory import predict_memory
from meshwright.predict.published.adapters import adapter_of
from meshwright.predict.published.clusters import cluster_of_row
from meshwright.predict.published.layouts import cheap_ops, layout_of
from meshwright.predict.published.memory_kind import measured_bytes, memory_kind, read_as
from meshwright.predict.published.models import Unusable, model_of
from meshwright.predict.published.software import software_of
from meshwright.predict.run import Run
from meshwright.predict.software import Software
from meshwright.predict.step import StepPrediction, predict_step
from meshwright.spec.files import read_text
from meshwright.spec.layout import Layout, Recompute, RecomputeOp, split_layers
from meshwright.spec.model import Experts
from meshwright.spec.work import Work
from meshwright.spec.workload import Training


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """One row with its prediction."""

    id: str
    source: str
    gpu: str
    grade: str
    moe: bool
    predicted_step_s: float | None = None
    low_s: float | None = None
    """Lower end of the prediction's interval."""
    high_s: float | None = None
    """Upper end."""
    predicted_memory_gib: float | None = None
    predicted_mfu: float | None = None
    fits: bool | None = None
    """Whether it is predicted to fit in memory."""
    measured_step_s: float | None = None
    measured_memory_gib: float | None = None
    measured_mfu: float | None = None
    """As the source prints it, in its own way of counting."""
    error: float | None = None
    """Predicted over measured step time, less one."""
    memory_error: float | None = None
    assumed: tuple[str, ...] = ()
    """What the row does not say and was filled in."""
    doubts: tuple[str, ...] = ()
    """What makes the comparison unsure, the heaviest first."""
    layout_key: tuple[object, ...] = ()
    """What rows have in common that differ in their layout only."""
    setup: tuple[Layout, Software] | None = None
    """The layout and the software of the prediction."""
    skipped: str | None = None
    """Why there is no prediction."""


def read_rows(path: str | Path) -> list[Any]:
    """Read a file of published runs; entries that are none are scored as such."""
    text = read_text(path)
    try:
        rows = json.loads(text)
    except ValueError as error:
        what = f"is not valid JSON: {error}"
        raise InputError([Problem(str(path), what, "give a list of runs")]) from None
    if not isinstance(rows, list):
        fix = "give a JSON list with one object per run, as validation/training/runs.json has"
        raise InputError([Problem(str(path), "is not a list of runs", fix)])
    return rows


def score(rows: Iterable[Any]) -> list[Scored]:
    """Score every row, in order."""
    return [score_row(row, index) for index, row in enumerate(rows)]


def score_row(row: Any, index: int = 0) -> Scored:
    """Predict one row; a row that cannot be predicted says why."""
    if not isinstance(row, Mapping):
        what = f"{row!r:.40} is no run: a run is an object with model, gpu, layout and so on"
        return Scored(id=str(index), source="", gpu="", grade="", moe=False, skipped=what)
    measured = row.get("measured") or {}
    derived = row.get("derived") or {}
    model = row.get("model")
    step_s = derived.get("step_time_s") or measured.get("step_time_s")
    held = measured_bytes(row)
    scored = Scored(
        id=str(row.get("id", index)),
        source=str(row.get("family") or row.get("source") or ""),
        gpu=str(row.get("gpu", "")),
        grade=str(row.get("grade") or ""),
        moe=isinstance(model, Mapping) and bool(model.get("experts")),
        measured_step_s=step_s,
        measured_memory_gib=None if held is None else held / 2**30,
        measured_mfu=measured.get("mfu"),
    )
    try:
        return _predicted(scored, row)
    except Unusable as unusable:
        reason = str(unusable)
    except InputError as error:
        reason = str(error.problems[0])
    except KeyError as error:
        reason = f"the row lacks {error.args[0]!r}"
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        reason = f"the row garbles a field: {error}"
    return replace(scored, skipped=reason)


class Prepared(NamedTuple):
    """A row read as work: all that a prediction needs but the constants."""

    source: str
    measured_step_s: float
    work: Work
    software: Software
    assumed: tuple[str, ...]

    def run(self, constants: StepConstants = CONSTANTS) -> Run:
        """Return the run that the row describes."""
        return Run(self.work, software=self.software, constants=constants)


def prepare(row: Mapping[str, Any]) -> Prepared | None:
    """Read a row as work, or return None where it cannot be predicted or was not timed."""
    scored = score_row(row)
    if scored.skipped is not None or not scored.measured_step_s:
        return None
    return _prepared(scored, row)


def _prepared(scored: Scored, row: Mapping[str, Any]) -> Prepared:
    for name in ("model", "layout"):
        if not isinstance(row.get(name), Mapping):
            raise Unusable(f"the row has no {name}")
    step_s = scored.measured_step_s
    if step_s is not None and not 0 < step_s < math.inf:
        raise Unusable(f"a step of {step_s!r} s cannot be")
    for name in ("gpus", "seq", "global_batch"):
        value = row.get(name)
        if type(value) is not int or not 0 < value < 10**9:
            raise Unusable(f"the row does not say {name}")
    model, cluster = model_of(row), cluster_of_row(row)
    read = layout_of(row, model)
    batch = read.layout.global_batch or row["global_batch"]
    adapter, guessed = adapter_of(row)
    training = Training(
        tokens=row["seq"] * batch,
        sequence_length=row["seq"],
        global_batch=batch,
        adapter=adapter,
    )
    ready = Prepared(
        source=scored.source,
        measured_step_s=scored.measured_step_s or 0.0,
        work=Work(model=model, cluster=cluster, layout=read.layout, workload=training),
        software=software_of(row, read.layout, cluster.gpu),
        assumed=(*read.assumed, *guessed),
    )
    if not read.recompute_known:
        ready = _with_recompute(ready)
    unsaid = "activations" in read.layout.offload and read.layout.offload_layers is None
    return _with_offload(ready) if unsaid else ready


def _predicted(scored: Scored, row: Mapping[str, Any]) -> Scored:
    ready = _prepared(scored, row)
    run = ready.run()
    step = predict_step(run)
    memory = predict_memory(run)
    gib = read_as(memory.worst, memory_kind(row).reading) / 2**30
    return replace(
        scored,
        predicted_step_s=step.step_s,
        low_s=step.low_s,
        high_s=step.high_s,
        predicted_memory_gib=gib,
        predicted_mfu=step.mfu,
        fits=memory.fits,
        error=_over(step.step_s, scored.measured_step_s),
        memory_error=_over(gib, scored.measured_memory_gib),
        assumed=ready.assumed,
        doubts=tuple(_doubts(row, ready, step)),
        layout_key=_layout_key(row, scored),
        setup=(run.layout, run.software),
    )


_CAUSES = (
    ("tp_s", "tensor-parallel communication"),
    ("cp_s", "context-parallel communication"),
    ("ep_s", "the experts' exchange"),
    ("pp_s", "pipeline transfers"),
    ("dp_s", "the exchange of gradients and parameters"),
    ("bubble_s", "the pipeline's bubble"),
)
_HEAVY = 0.15
"""Share of a step from which on a cause other than compute is worth naming."""


def _doubts(row: Mapping[str, Any], ready: Prepared, step: StepPrediction) -> Iterator[str]:
    """Say what makes a row hard to compare with."""
    measured = row.get("measured") or {}
    if not measured.get("step_time_s") and not measured.get("tokens_per_s_per_gpu"):
        yield "its step is derived from printed TFLOP/s, whose count of attention is a guess"
    if ready.assumed:
        yield f"assumed: {', '.join(ready.assumed)}"
    if _paced_by_host(ready):
        yield "its layers of experts may be paced by the host"
    parts = sorted(((getattr(step, name), text) for name, text in _CAUSES), reverse=True)
    for seconds, text in parts:
        if seconds > _HEAVY * step.step_s:
            yield f"{text} is {seconds / step.step_s:.0%} of the prediction"


def _paced_by_host(ready: Prepared) -> bool:
    experts = any(isinstance(block.mlp, Experts) for block in ready.work.model.blocks)
    return experts and not ready.software.graphs


def _layout_key(row: Mapping[str, Any], scored: Scored) -> tuple[object, ...]:
    model = row["model"]
    sizes = tuple(str(model.get(name)) for name in ("name", "layers", "hidden", "heads", "vocab"))
    asked = tuple(row.get(name) for name in ("gpus", "global_batch", "seq", "precision_class"))
    # Tables of one source differ in their software as well, so a group stays within one.
    table = str(row.get("source"))
    return scored.source, scored.gpu, sizes, asked, str(row.get("task")), table


def _over(predicted: float, measured: float | None) -> float | None:
    return predicted / measured - 1 if measured else None


def _with_recompute(ready: Prepared) -> Prepared:
    """Take the least recompute that fits where the row does not say."""
    cheap = ("layernorm", *cheap_ops(ready.work.model))
    tries: tuple[tuple[Recompute, tuple[RecomputeOp, ...]], ...] = (
        ("none", ()), ("selective", cheap), ("selective", (*cheap, "mlp", "moe")), ("full", ()),
    )  # fmt: skip
    for kind, ops in tries:
        layout = replace(ready.work.layout, recompute=kind, recompute_ops=ops)
        tried = ready._replace(
            work=replace(ready.work, layout=layout),
            assumed=(*ready.assumed, f"recompute {kind}"),
        )
        if predict_memory(tried.run()).fits:
            break
    return tried


def _with_offload(ready: Prepared) -> Prepared:
    """Offload the activations of the fewest layers that fit where the row does not say how many."""
    work = ready.work

    def on(layers: int) -> Prepared:
        layout = replace(work.layout, offload_layers=layers)
        said = f"activations of {layers} layers per chunk offloaded"
        return ready._replace(work=replace(work, layout=layout), assumed=(*ready.assumed, said))

    some = range(1, max(split_layers(work.layout, work.model.layers)))
    fewest = bisect_left(some, True, key=lambda layers: predict_memory(on(layers).run()).fits)
    return on(1 + fewest)
