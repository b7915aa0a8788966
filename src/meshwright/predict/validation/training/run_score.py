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
from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.step.step_prediction import StepPrediction, predict_step
from meshwright.predict.training_run.step_constants import STEP_CONSTANTS, StepConstants
from meshwright.predict.training_run.training_framework import TrainingFramework
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.predict.validation.training.memory_metric import (
    classify_memory_metric,
    get_comparable_bytes,
    measured_bytes,
)
from meshwright.predict.validation.training.run_cluster import read_cluster
from meshwright.predict.validation.training.run_framework import infer_framework
from meshwright.predict.validation.training.run_layout import list_cheap_recompute_ops, read_layout
from meshwright.predict.validation.training.run_lora import read_lora
from meshwright.predict.validation.training.run_model import UnusableRowError, read_model
from meshwright.spec.file_formats import read_text
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout, Recompute, RecomputeOp, split_layers
from meshwright.spec.model import MoESpec
from meshwright.spec.workload import TrainingWorkload


class ScoredRun(msgspec.Struct, frozen=True, kw_only=True):
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
    caveats: tuple[str, ...] = ()
    """What makes the comparison unsure, the heaviest first."""
    layout_key: tuple[object, ...] = ()
    """What rows have in common that differ in their layout only."""
    setup: tuple[Layout, TrainingFramework] | None = None
    """The layout and the software of the prediction."""
    skipped: str | None = None
    """Why there is no prediction."""


def read_runs(path: str | Path) -> list[Any]:
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


def score_runs(rows: Iterable[Any]) -> list[ScoredRun]:
    """Score every row, in order."""
    return [score_run(row, index) for index, row in enumerate(rows)]


def score_run(row: Any, index: int = 0) -> ScoredRun:
    """Predict one row; a row that cannot be predicted says why."""
    if not isinstance(row, Mapping):
        what = f"{row!r:.40} is no run: a run is an object with model, gpu, layout and so on"
        return ScoredRun(id=str(index), source="", gpu="", grade="", moe=False, skipped=what)
    measured = row.get("measured") or {}
    derived = row.get("derived") or {}
    model = row.get("model")
    step_s = derived.get("step_time_s") or measured.get("step_time_s")
    held = measured_bytes(row)
    scored = ScoredRun(
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
    except UnusableRowError as unusable:
        reason = str(unusable)
    except InputError as error:
        reason = str(error.problems[0])
    except KeyError as error:
        reason = f"the row lacks {error.args[0]!r}"
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        reason = f"the row garbles a field: {error}"
    return replace(scored, skipped=reason)


class PreparedRun(NamedTuple):
    """A row read as work: all that a prediction needs but the constants."""

    source: str
    measured_step_s: float
    job: JobSpec
    framework: TrainingFramework
    assumed: tuple[str, ...]

    def build_run(self, constants: StepConstants = STEP_CONSTANTS) -> TrainingRun:
        """Return the run that the row describes."""
        return TrainingRun(self.job, framework=self.framework, constants=constants)


def prepare_run(row: Mapping[str, Any]) -> PreparedRun | None:
    """Read a row as work, or return None where it cannot be predicted or was not timed."""
    scored = score_run(row)
    if scored.skipped is not None or not scored.measured_step_s:
        return None
    return _prepared(scored, row)


def _prepared(scored: ScoredRun, row: Mapping[str, Any]) -> PreparedRun:
    for name in ("model", "layout"):
        if not isinstance(row.get(name), Mapping):
            raise UnusableRowError(f"the row has no {name}")
    step_s = scored.measured_step_s
    if step_s is not None and not 0 < step_s < math.inf:
        raise UnusableRowError(f"a step of {step_s!r} s cannot be")
    for name in ("gpus", "seq", "global_batch"):
        value = row.get(name)
        if type(value) is not int or not 0 < value < 10**9:
            raise UnusableRowError(f"the row does not say {name}")
    model, cluster = read_model(row), read_cluster(row)
    read = read_layout(row, model)
    batch = read.layout.global_batch or row["global_batch"]
    adapter, guessed = read_lora(row)
    training = TrainingWorkload(
        tokens=row["seq"] * batch,
        sequence_length=row["seq"],
        global_batch=batch,
        adapter=adapter,
    )
    ready = PreparedRun(
        source=scored.source,
        measured_step_s=scored.measured_step_s or 0.0,
        job=JobSpec(model=model, cluster=cluster, layout=read.layout, workload=training),
        framework=infer_framework(row, read.layout, cluster.gpu),
        assumed=(*read.assumed, *guessed),
    )
    if not read.recompute_known:
        ready = _with_recompute(ready)
    unsaid = "activations" in read.layout.offload and read.layout.offload_layers is None
    return _with_offload(ready) if unsaid else ready


def _predicted(scored: ScoredRun, row: Mapping[str, Any]) -> ScoredRun:
    ready = _prepared(scored, row)
    run = ready.build_run()
    step = predict_step(run)
    memory = predict_memory(run)
    gib = get_comparable_bytes(memory.worst_stage, classify_memory_metric(row).counter) / 2**30
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
        caveats=tuple(_doubts(row, ready, step)),
        layout_key=_layout_key(row, scored),
        setup=(run.layout, run.framework),
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


def _doubts(row: Mapping[str, Any], ready: PreparedRun, step: StepPrediction) -> Iterator[str]:
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


def _paced_by_host(ready: PreparedRun) -> bool:
    experts = any(isinstance(block.mlp, MoESpec) for block in ready.job.model.blocks)
    return experts and not ready.framework.cuda_graphs


def _layout_key(row: Mapping[str, Any], scored: ScoredRun) -> tuple[object, ...]:
    model = row["model"]
    sizes = tuple(str(model.get(name)) for name in ("name", "layers", "hidden", "heads", "vocab"))
    asked = tuple(row.get(name) for name in ("gpus", "global_batch", "seq", "precision_class"))
    # Tables of one source differ in their software as well, so a group stays within one.
    table = str(row.get("source"))
    return scored.source, scored.gpu, sizes, asked, str(row.get("task")), table


def _over(predicted: float, measured: float | None) -> float | None:
    return predicted / measured - 1 if measured else None


def _with_recompute(ready: PreparedRun) -> PreparedRun:
    """Take the least recompute that fits where the row does not say."""
    cheap = ("layernorm", *list_cheap_recompute_ops(ready.job.model))
    tries: tuple[tuple[Recompute, tuple[RecomputeOp, ...]], ...] = (
        ("none", ()), ("selective", cheap), ("selective", (*cheap, "mlp", "moe")), ("full", ()),
    )  # fmt: skip
    for kind, ops in tries:
        layout = replace(ready.job.layout, recompute=kind, recompute_ops=ops)
        tried = ready._replace(
            job=replace(ready.job, layout=layout),
            assumed=(*ready.assumed, f"recompute {kind}"),
        )
        if predict_memory(tried.build_run()).fits:
            break
    return tried


def _with_offload(ready: PreparedRun) -> PreparedRun:
    """Offload the activations of the fewest layers that fit where the row does not say how many."""
    work = ready.job

    def on(layers: int) -> PreparedRun:
        layout = replace(work.layout, offload_layers=layers)
        said = f"activations of {layers} layers per chunk offloaded"
        return ready._replace(job=replace(work, layout=layout), assumed=(*ready.assumed, said))

    some = range(1, max(split_layers(work.layout, work.model.layers)))
    fewest = bisect_left(some, True, key=lambda layers: predict_memory(on(layers).build_run()).fits)
    return on(1 + fewest)
