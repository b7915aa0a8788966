"""The changes to a layout that would help most: its neighbours, predicted and ranked.

Every neighbour differs in one kind of decision (the split of the GPUs, the microbatch, the
schedule …). This is advice about one step, not a search: it tries some hundred layouts.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from meshwright.errors import InputError
from meshwright.predict.memory import MemoryPrediction, predict_memory
from meshwright.predict.relayout import differences, relayout
from meshwright.predict.run import Run
from meshwright.predict.step import StepPrediction, predict_step
from meshwright.spec.layout import Layout
from meshwright.spec.layout.stages import split_layers
from meshwright.spec.model import Experts, Mlp
from meshwright.spec.work import Work

LEAST_GAIN = 0.005
"""Share of a step's time below which a change is not worth a line."""
LEAST_RELIEF = 0.1
"""Share of the memory that is missing which a change must bring where none brings all of it."""
FACTORS = (2, 3, 4)
"""By how much a degree is raised or lowered."""


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One change to a layout, and what it is predicted to bring."""

    kind: str
    """The decision that changes: split, microbatch, schedule, recompute and so on."""
    what: str
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


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """The changes that would help a layout most."""

    best: tuple[Change, ...]
    """One of each kind, the best first."""
    joined: tuple[Change, ...] = ()
    """Those of them that help each other."""
    together: Change | None = None
    """What making all of these brings; None where the best alone is best."""


class Proposal(NamedTuple):
    """A neighbour of a layout before anyone looked at it."""

    kind: str
    what: str
    fields: dict[str, Any]


class _Judge:
    """Predicts neighbours of one work and keeps those that are sound."""

    def __init__(self, work: Work, run_of: Callable[[Work], Run]) -> None:
        self.work, self.run_of = work, run_of
        run = run_of(work)
        self.step, self.memory = predict_step(run), predict_memory(run)
        self.missing_bytes = self.memory.worst.total_bytes - self.memory.capacity_bytes

    def relieves(self, saved_bytes: int) -> bool:
        """Tell whether that brings a layout which does not fit a good deal nearer."""
        return saved_bytes >= LEAST_RELIEF * self.missing_bytes

    def rank(self, change: Change) -> tuple[int, float]:
        """Order by time: those that fit, then those that come nearer, then the merely faster."""
        if change.memory.fits:
            return 0, change.step.step_s
        return 1 if self.relieves(change.saved_bytes) else 2, change.step.step_s

    def change(self, proposal: Proposal) -> Change | None:
        """Predict one neighbour; None where it is not valid, or no improvement of any kind."""
        try:
            layout = relayout(self.work.layout, self.work.model.layers, **proposal.fields)
        except InputError:
            return None
        work = msgspec.structs.replace(self.work, layout=layout)
        if any(problem.where != "memory" for problem in work.check()):
            return None
        run = self.run_of(work)
        step = predict_step(run)
        gain = 1 - step.step_s / self.step.step_s
        if self.memory.fits and gain < LEAST_GAIN:
            return None
        memory = predict_memory(run)
        saved = self.memory.worst.total_bytes - memory.worst.total_bytes
        if not memory.fits:
            useful = self.relieves(saved) or gain >= LEAST_GAIN
            if self.memory.fits or not useful:
                return None
        return Change(
            kind=proposal.kind,
            what=proposal.what,
            fields=differences(self.work.layout, layout),
            step=step,
            memory=memory,
            gain=gain,
            saved_bytes=saved,
            changes_numerics="precision" in proposal.fields,
        )


def best_changes(work: Work, *, most: int = 3, run_of: Callable[[Work], Run] = Run) -> Advice:
    """Return the changes of a layout that save most time, and fit.

    Where the layout itself does not fit, those that make it fit come first, then those that bring
    it nearer, then those that would make it faster once it fits.
    """
    judge = _Judge(work, run_of)
    by_kind: dict[str, Change] = {}
    for proposal in proposals(work):
        found = judge.change(proposal)
        if found is not None:
            known = by_kind.get(found.kind)
            if known is None or judge.rank(found) < judge.rank(known):
                by_kind[found.kind] = found
    best = tuple(sorted(by_kind.values(), key=judge.rank)[:most])
    return _joined(judge, best)


def _helps(both: Change, one: Change) -> bool:
    """Tell whether two changes are better than one: faster, or nearer to fitting."""
    if one.memory.fits:
        return both.memory.fits and both.step.step_s < one.step.step_s
    return both.saved_bytes > one.saved_bytes


def _joined(judge: _Judge, best: tuple[Change, ...]) -> Advice:
    """Make the changes one after the other, as long as each helps those before it."""
    together, joined = (best[0], [best[0]]) if best else (None, [])
    for change in best[1:]:
        if together is None or set(change.fields) & set(together.fields):
            continue
        what = f"{together.what} + {change.what}"
        both = judge.change(Proposal("together", what, {**together.fields, **change.fields}))
        if both is not None and _helps(both, together):
            together, joined = both, [*joined, change]
    if len(joined) < 2:
        return Advice(best=best)
    return Advice(best=best, joined=tuple(joined), together=together)


def proposals(work: Work) -> Iterator[Proposal]:
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


def _splits(work: Work) -> Iterator[Proposal]:
    """Move a factor from one axis to another, with the microbatch left, doubled or halved."""
    layout = work.layout
    for factor in FACTORS:
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
                    yield Proposal("split", what, fields)
                    for proposal in _microbatches(layout):
                        both = {**fields, **proposal.fields}
                        yield Proposal("split", f"{what}, {proposal.what}", both)


def _with_chunks(layout: Layout, moved: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Keep the chunks per rank, or where the pipeline changes, the chunks of the whole model."""
    yield dict(moved)
    pp = moved.get("pp", layout.pp)
    if layout.virtual_stages > 1 and pp not in (1, layout.pp) and layout.chunks % pp == 0:
        yield {**moved, "virtual_stages": layout.chunks // pp}


def _experts(work: Work) -> Iterator[Proposal]:
    layout = work.layout
    if work.model.experts is None:
        return
    for factor in FACTORS:
        yield Proposal("experts", "experts over more GPUs", {"ep": layout.ep * factor})
        if layout.ep % factor == 0:
            yield Proposal("experts", "experts over fewer GPUs", {"ep": layout.ep // factor})
    if layout.experts_tp > 1:
        fields = {"expert_tp": 1, "ep": layout.ep * layout.experts_tp}
        yield Proposal("experts", "whole experts, none cut by tensor parallelism", fields)


def _microbatches(layout: Layout) -> Iterator[Proposal]:
    yield Proposal("microbatch", "larger microbatches", {"microbatch": 2 * layout.microbatch})
    if layout.microbatch % 2 == 0:
        fields = {"microbatch": layout.microbatch // 2}
        yield Proposal("microbatch", "smaller microbatches", fields)


def _schedules(work: Work) -> Iterator[Proposal]:
    layout = work.layout
    if layout.pp == 1:
        return
    yield Proposal("schedule", "plain 1F1B, one chunk per rank", {"schedule": "1f1b"})
    yield Proposal("schedule", "zero-bubble schedule (ZB-H1)", {"schedule": "zb-h1"})
    each = -(-work.model.layers // layout.pp)
    for chunks in (count for count in range(2, min(each, 12) + 1) if each % count == 0):
        what = f"interleave {chunks} chunks on each rank"
        fields = {"schedule": "interleaved", "virtual_stages": chunks}
        yield Proposal("schedule", what, fields)


def _recompute(work: Work) -> Iterator[Proposal]:
    """Every amount of recompute, from none to all."""
    layout, model = work.layout, work.model
    blocks = [block for block, _ in model.block_counts()]
    cheap = ["layernorm"]
    cheap += ["mlp_act"] if any(isinstance(block.mlp, Mlp) for block in blocks) else []
    cheap += ["moe_act"] if any(isinstance(block.mlp, Experts) for block in blocks) else []
    nothing: dict[str, Any] = {"recompute_ops": (), "recompute_layers": None}
    yield Proposal("recompute", "keep all activations", {**nothing, "recompute": "none"})
    fields = {**nothing, "recompute": "selective", "recompute_ops": tuple(cheap)}
    yield Proposal("recompute", "recompute norms and activations only", fields)
    if layout.chunks > model.layers:
        return
    deepest = max(split_layers(layout, model.layers))
    for layers in sorted({deepest // 4, deepest // 2, 3 * deepest // 4} - {0}):
        fields = {**nothing, "recompute": "full", "recompute_layers": layers}
        what = f"recompute {layers} of {deepest} layers of a chunk"
        yield Proposal("recompute", what, fields)
    yield Proposal("recompute", "recompute every layer", {**nothing, "recompute": "full"})


def _sharding(layout: Layout) -> Iterator[Proposal]:
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
            yield Proposal("sharding", what, {"zero": stage})


def _switches(layout: Layout) -> Iterator[Proposal]:
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
            yield Proposal(name, what, {name: True})
    if layout.cp > 1:
        for kind in ("ring", "allgather", "ulysses"):
            if kind != layout.cp_kind:
                yield Proposal("cp_kind", f"context parallelism by {kind}", {"cp_kind": kind})


def _precision(work: Work) -> Iterator[Proposal]:
    """Offer the 8-bit format that the device takes in hardware."""
    if work.layout.precision not in ("bf16", "fp16", "fp32"):
        return
    has = work.cluster.gpu.precisions
    for name in ("mxfp8", "fp8-tensorwise"):
        if name in has:
            yield Proposal("precision", f"{name} products", {"precision": name})
            return
