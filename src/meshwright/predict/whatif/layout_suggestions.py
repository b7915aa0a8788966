"""The changes to a layout that would help most: its neighbours, predicted and ranked.

Every neighbour differs in one kind of decision (the split of the GPUs, the microbatch, the
schedule …). This is advice about one step, not a search: it tries some hundred layouts.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from meshwright.errors import InputError
from meshwright.predict.memory.memory_prediction import MemoryPrediction, predict_memory
from meshwright.predict.step.step_prediction import StepPrediction, predict_step
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.layout.layout_changes import change_layout, list_changed_fields
from meshwright.spec.layout.pipeline_chunks import split_layers
from meshwright.spec.model import MLPSpec, MoESpec

MIN_GAIN = 0.005
"""Share of a step's time below which a change is not worth a line."""
MIN_MEMORY_RELIEF = 0.1
"""Share of the memory that is missing which a change must bring where none brings all of it."""
DEGREE_FACTORS = (2, 3, 4)
"""By how much a degree is raised or lowered."""


class LayoutSuggestion(msgspec.Struct, frozen=True, kw_only=True):
    """One change to a layout, and what it is predicted to bring."""

    kind: str
    """The decision that changes: split, microbatch, schedule, recompute and so on."""
    description: str
    """The change in words."""
    fields: dict[str, Any]
    """The layout's fields that change, with their new values."""
    step: StepPrediction
    """The step with the change made."""
    memory: MemoryPrediction
    """Its memory."""
    gain: float
    """Share of the step's time that it saves; below 0 where it costs time to save memory."""
    saved_bytes: int
    """Memory that the worst rank saves; below 0 where it needs more."""
    changes_numerics: bool = False
    """Whether results round differently, which a user must want."""


class LayoutSuggestions(msgspec.Struct, frozen=True, kw_only=True):
    """The changes that would help a layout most."""

    best: tuple[LayoutSuggestion, ...]
    """One of each kind, the best first."""
    combined_changes: tuple[LayoutSuggestion, ...] = ()
    """Those of them that help each other."""
    combined_gain: LayoutSuggestion | None = None
    """What making all of these brings; None where the best alone is best."""


class LayoutNeighbour(NamedTuple):
    """A neighbour of a layout before anyone looked at it."""

    kind: str
    description: str
    fields: dict[str, Any]


class _Judge:
    """Predicts neighbours of one work and keeps those that are sound."""

    def __init__(self, work: JobSpec, run_of: Callable[[JobSpec], TrainingRun]) -> None:
        self.work, self.run_of = work, run_of
        run = run_of(work)
        self.step, self.memory = predict_step(run), predict_memory(run)
        self.missing_bytes = self.memory.worst_stage.total_bytes - self.memory.capacity_bytes

    def relieves(self, saved_bytes: int) -> bool:
        """Tell whether that brings a layout which does not fit a good deal nearer."""
        return saved_bytes >= MIN_MEMORY_RELIEF * self.missing_bytes

    def rank(self, change: LayoutSuggestion) -> tuple[int, float]:
        """Order by time: those that fit, then those that come nearer, then the merely faster."""
        if change.memory.fits:
            return 0, change.step.step_s
        return 1 if self.relieves(change.saved_bytes) else 2, change.step.step_s

    def change(self, proposal: LayoutNeighbour) -> LayoutSuggestion | None:
        """Predict one neighbour; None where it is not valid, or no improvement of any kind."""
        try:
            layout = change_layout(self.work.layout, self.work.model.layers, **proposal.fields)
        except InputError:
            return None
        work = msgspec.structs.replace(self.work, layout=layout)
        if any(problem.where != "memory" for problem in work.check()):
            return None
        run = self.run_of(work)
        step = predict_step(run)
        gain = 1 - step.step_s / self.step.step_s
        if self.memory.fits and gain < MIN_GAIN:
            return None
        memory = predict_memory(run)
        saved = self.memory.worst_stage.total_bytes - memory.worst_stage.total_bytes
        if not memory.fits:
            useful = self.relieves(saved) or gain >= MIN_GAIN
            if self.memory.fits or not useful:
                return None
        return LayoutSuggestion(
            kind=proposal.kind,
            description=proposal.description,
            fields=list_changed_fields(self.work.layout, layout),
            step=step,
            memory=memory,
            gain=gain,
            saved_bytes=saved,
            changes_numerics="precision" in proposal.fields,
        )


def suggest_layouts(
    work: JobSpec, *, most: int = 3, run_of: Callable[[JobSpec], TrainingRun] = TrainingRun
) -> LayoutSuggestions:
    """Return the changes of a layout that save most time, and fit.

    Where the layout itself does not fit, those that make it fit come first, then those that bring
    it nearer, then those that would make it faster once it fits.
    """
    judge = _Judge(work, run_of)
    by_kind: dict[str, LayoutSuggestion] = {}
    for proposal in list_neighbours(work):
        found = judge.change(proposal)
        if found is not None:
            known = by_kind.get(found.kind)
            if known is None or judge.rank(found) < judge.rank(known):
                by_kind[found.kind] = found
    best = tuple(sorted(by_kind.values(), key=judge.rank)[:most])
    return _joined(judge, best)


def _helps(both: LayoutSuggestion, one: LayoutSuggestion) -> bool:
    """Tell whether two changes are better than one: faster, or nearer to fitting."""
    if one.memory.fits:
        return both.memory.fits and both.step.step_s < one.step.step_s
    return both.saved_bytes > one.saved_bytes


def _joined(judge: _Judge, best: tuple[LayoutSuggestion, ...]) -> LayoutSuggestions:
    """Make the changes one after the other, as long as each helps those before it."""
    together, joined = (best[0], [best[0]]) if best else (None, [])
    for change in best[1:]:
        if together is None or set(change.fields) & set(together.fields):
            continue
        what = f"{together.description} + {change.description}"
        both = judge.change(LayoutNeighbour("together", what, {**together.fields, **change.fields}))
        if both is not None and _helps(both, together):
            together, joined = both, [*joined, change]
    if len(joined) < 2:
        return LayoutSuggestions(best=best)
    return LayoutSuggestions(best=best, combined_changes=tuple(joined), combined_gain=together)


def list_neighbours(work: JobSpec) -> Iterator[LayoutNeighbour]:
    """List the neighbours of a layout, sound or not."""
    yield from _splits(work)
    yield from _experts(work)
    yield from _microbatches(work.layout)
    yield from _schedules(work)
    yield from _recompute(work)
    yield from _sharding(work.layout)
    yield from _switches(work.layout)
    yield from _precision(work)


_AXES = {"tp": "tensor", "cp": "context", "pp": "pipeline", "dp": "data"}


def _splits(work: JobSpec) -> Iterator[LayoutNeighbour]:
    """Move a factor from one axis to another, with the microbatch left, doubled or halved."""
    layout = work.layout
    for factor in DEGREE_FACTORS:
        for giver, less in _AXES.items():
            for taker, more in _AXES.items():
                if giver == taker or getattr(layout, giver) % factor:
                    continue
                moved = {
                    giver: getattr(layout, giver) // factor,
                    taker: getattr(layout, taker) * factor,
                }
                if taker == "tp" and layout.tp == 1:
                    moved["sequence_parallel"] = True
                what = f"less {less}, more {more} parallelism"
                for fields in _with_chunks(layout, moved):
                    yield LayoutNeighbour("split", what, fields)
                    for proposal in _microbatches(layout):
                        both = {**fields, **proposal.fields}
                        yield LayoutNeighbour("split", f"{what}, {proposal.description}", both)


def _with_chunks(layout: Layout, moved: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Keep the chunks per rank, or where the pipeline changes, the chunks of the whole model."""
    yield dict(moved)
    pp = moved.get("pp", layout.pp)
    if layout.virtual_stages > 1 and pp not in (1, layout.pp) and layout.chunks % pp == 0:
        yield {**moved, "virtual_stages": layout.chunks // pp}


def _experts(work: JobSpec) -> Iterator[LayoutNeighbour]:
    layout = work.layout
    if work.model.moe is None:
        return
    for factor in DEGREE_FACTORS:
        yield LayoutNeighbour("experts", "experts over more GPUs", {"ep": layout.ep * factor})
        if layout.ep % factor == 0:
            yield LayoutNeighbour("experts", "experts over fewer GPUs", {"ep": layout.ep // factor})
    if layout.effective_expert_tp > 1:
        fields = {"expert_tp": 1, "ep": layout.ep * layout.effective_expert_tp}
        yield LayoutNeighbour("experts", "whole experts, none cut by tensor parallelism", fields)


def _microbatches(layout: Layout) -> Iterator[LayoutNeighbour]:
    yield LayoutNeighbour(
        "microbatch", "larger microbatches", {"microbatch": 2 * layout.microbatch}
    )
    if layout.microbatch % 2 == 0:
        fields = {"microbatch": layout.microbatch // 2}
        yield LayoutNeighbour("microbatch", "smaller microbatches", fields)


def _schedules(work: JobSpec) -> Iterator[LayoutNeighbour]:
    layout = work.layout
    if layout.pp == 1:
        return
    yield LayoutNeighbour("schedule", "plain 1F1B, one chunk per rank", {"schedule": "1f1b"})
    yield LayoutNeighbour("schedule", "zero-bubble schedule (ZB-H1)", {"schedule": "zb-h1"})
    each = -(-work.model.layers // layout.pp)
    for chunks in (count for count in range(2, min(each, 12) + 1) if each % count == 0):
        what = f"interleave {chunks} chunks on each rank"
        fields = {"schedule": "interleaved", "virtual_stages": chunks}
        yield LayoutNeighbour("schedule", what, fields)


def _recompute(work: JobSpec) -> Iterator[LayoutNeighbour]:
    """Every amount of recompute, from none to all."""
    layout, model = work.layout, work.model
    blocks = [block for block, _ in model.count_layers_by_block()]
    cheap = ["layernorm"]
    cheap += ["mlp_act"] if any(isinstance(block.mlp, MLPSpec) for block in blocks) else []
    cheap += ["moe_act"] if any(isinstance(block.mlp, MoESpec) for block in blocks) else []
    nothing: dict[str, Any] = {"recompute_ops": (), "recompute_layers": None}
    yield LayoutNeighbour("recompute", "keep all activations", {**nothing, "recompute": "none"})
    fields = {**nothing, "recompute": "selective", "recompute_ops": tuple(cheap)}
    yield LayoutNeighbour("recompute", "recompute norms and activations only", fields)
    if layout.chunks > model.layers:
        return
    deepest = max(split_layers(layout, model.layers))
    for layers in sorted({deepest // 4, deepest // 2, 3 * deepest // 4} - {0}):
        fields = {**nothing, "recompute": "full", "recompute_layers": layers}
        what = f"recompute {layers} of {deepest} layers of a chunk"
        yield LayoutNeighbour("recompute", what, fields)
    yield LayoutNeighbour("recompute", "recompute every layer", {**nothing, "recompute": "full"})


def _sharding(layout: Layout) -> Iterator[LayoutNeighbour]:
    """Shard more or less; few trainers run stages 2 and 3 beside a pipeline, so not there."""
    if layout.dp * layout.cp == 1:
        return
    for stage in (0, 1) if layout.pp > 1 else (0, 1, 2, 3):
        what = {
            0: "share no states (no ZeRO)",
            1: "share optimizer states (ZeRO 1)",
            2: "share gradients as well (ZeRO 2)",
            3: "share parameters as well (ZeRO 3)",
        }[stage]
        if stage != layout.zero:
            yield LayoutNeighbour("sharding", what, {"zero": stage})


def _switches(layout: Layout) -> Iterator[LayoutNeighbour]:
    """Turn on what hides communication, and split what tensor parallelism leaves whole."""
    replicas = layout.dp * layout.cp > 1
    useful = {
        "sequence_parallel": (layout.tp > 1, "split norms along the sequence"),
        "overlap_gradients": (replicas, "reduce gradients during backward"),
        "overlap_parameters": (
            replicas and layout.zero > 0,
            "gather parameters ahead of use",
        ),
        "overlap_tp": (layout.tp > 1, "overlap tensor-parallel communication"),
        "overlap_pp": (layout.pp > 1, "overlap pipeline sends"),
        "overlap_ep": (layout.ep > 1, "overlap the experts' exchange"),
    }
    for name, (applies, what) in useful.items():
        if applies and not getattr(layout, name):
            yield LayoutNeighbour(name, what, {name: True})
    if layout.cp > 1:
        for kind in ("ring", "allgather", "ulysses"):
            if kind != layout.cp_kind:
                yield LayoutNeighbour(
                    "cp_kind", f"context parallelism by {kind}", {"cp_kind": kind}
                )


def _precision(work: JobSpec) -> Iterator[LayoutNeighbour]:
    """Offer the 8-bit format that the device takes in hardware."""
    if work.layout.precision not in ("bf16", "fp16", "fp32"):
        return
    has = work.cluster.gpu.precisions
    for name in ("mxfp8", "fp8-tensorwise"):
        if name in has:
            yield LayoutNeighbour("precision", f"{name} GEMMs", {"precision": name})
            return
