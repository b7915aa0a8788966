"""Draws a simulated step as a `Timeline`: kernels, collectives, transfers, waits, the update.

One rank stands for each pipeline stage: the stage's first GPU, by its global number. Its lane
`compute` has a kernel or a wait for every moment of the step. Collectives run on a lane per kind of
parallelism with their full length, beside compute where they hide; transfers are a send on one
rank and a receive on the other, tied by a flow. The host's lane names the passes.
"""

from typing import TYPE_CHECKING

import numpy as np

from meshwright.policy.pipeline.pass_spans import (
    LANE,
    OVERLAPPED_LANE,
    PASS_NAMES,
    PROCESS,
    encode_span_details,
)
from meshwright.predict.event_sim.action_costs import (
    PASSES,
    Ints,
    build_run_pass_table,
    has_distinct_last_backward,
)
from meshwright.predict.event_sim.pass_layers import LayerSegments
from meshwright.predict.event_sim.pass_spans import (
    COMPUTE,
    LANE_NAMES,
    WAIT_NAMES,
    PassSpan,
    build_pass_spans,
    merge_layers,
)
from meshwright.predict.event_sim.span_table import Floats, SpanTable
from meshwright.predict.step.pass_time import (
    LAST_BACKWARD,
    PassBreakdown,
    PassGroup,
    PassTable,
    get_group_breakdown,
)
from meshwright.predict.step.pipeline_bubble import skips_optimizer_barrier
from meshwright.predict.training_run.lora_shapes import count_trained_parameters
from meshwright.spec.layout import list_chunks
from meshwright.spec.layout.model_states import BYTES_PER_ELEMENT
from meshwright.spec.layout.ranks import RankCoordinate, get_rank
from meshwright.timeline import SpanKind, Timeline

if TYPE_CHECKING:
    from meshwright.predict.event_sim.step_simulation import SimulatedStep


def build_step_timeline(step: "SimulatedStep", most_layer_spans: int) -> Timeline:
    """Return every span of a simulated step.

    Passes are drawn layer by layer unless that takes more spans than allowed.
    """
    sheet = SpanTable()
    _add_host(step, sheet)
    _add_passes(step, sheet, most_layer_spans)
    _add_waits(step, sheet)
    _add_exchange(step, sheet)
    _add_transfers(step, sheet)
    layout = step.run.layout
    first_gpu = np.array([get_rank(layout, RankCoordinate(0, 0, 0, pp)) for pp in range(layout.pp)])
    metadata = {
        "model": step.run.model.name,
        "cluster": step.run.cluster.name,
        "gpus": str(layout.gpus),
        "schedule": step.schedule.kind,
        "step_s": repr(step.step_s),
        "ranks": "one per pipeline stage, its first GPU; all others of the stage do the same",
        "stages": str(layout.pp),
    }
    return Timeline.from_columns(
        sheet.to_columns(first_gpu),
        _in_flight(step, first_gpu),
        source="simulated",
        metadata=metadata,
    )


def _add_host(step: "SimulatedStep", sheet: SpanTable) -> None:
    """The passes by name, as a trainer would mark them."""
    actions, model = step.actions, step.run.model
    held = {one.position: one for one in list_chunks(step.run.layout, model.layers)}
    texts = [encode_span_details(held[at]) for at in sorted(held)]
    first = np.array([held[at].first for at in sorted(held)])
    lanes = sheet.encode("lane", [LANE, OVERLAPPED_LANE])
    sheet.add(
        actions.start_s,
        actions.end_s,
        process=PROCESS,
        lane=lanes[actions.is_concurrent.astype(np.int64)],
        kind=SpanKind.HOST.value,
        name=sheet.encode("name", [PASS_NAMES[op] for op in PASSES])[actions.op],
        stage=actions.rank,
        microbatch=actions.microbatch,
        layer=first[actions.chunk],
        extra=sheet.encode("extra", texts)[actions.chunk],
    )


_KINDS = (*PASSES, *LAST_BACKWARD.values())
"""What passes are told apart by."""


def _kinds_of(step: "SimulatedStep", table: PassTable) -> Ints:
    """Return every action's index into `_KINDS`."""
    actions, kinds = step.actions, step.actions.op.copy()
    if has_distinct_last_backward(table):
        for op, last in LAST_BACKWARD.items():
            some = np.flatnonzero(actions.op == PASSES.index(op))
            # Later ones of the same rank and chunk take the place of those before them.
            ends = dict(
                zip(zip(actions.rank[some], actions.chunk[some], strict=True), some, strict=True)
            )
            kinds[list(ends.values())] = _KINDS.index(last)
    return kinds


def _add_passes(step: "SimulatedStep", sheet: SpanTable, most_layer_spans: int) -> None:
    """What passes consist of: the beats of their kind, stretched to their length."""
    actions, book = step.actions, _Book(step)
    ops = _kinds_of(step, book.table)
    first = np.flatnonzero(~actions.is_concurrent)
    second = np.minimum(first + 1, len(actions.rank) - 1)
    paired = actions.is_concurrent[second] & (second > first)
    keys = np.column_stack(
        [
            ops[first],
            actions.chunk[first],
            np.where(paired, ops[second], -1),
            np.where(paired, actions.chunk[second], -1),
        ]
    )
    kinds, which = np.unique(keys, axis=0, return_inverse=True)
    beats = [book.beats(kind) for kind in kinds.tolist()]
    counts = np.bincount(which.ravel(), minlength=len(kinds))
    if sum(len(one) * n for one, n in zip(beats, counts, strict=True)) > most_layer_spans:
        beats = [book.beats(kind, merge=True) for kind in kinds.tolist()]
    for kind, some in enumerate(beats):
        _stamp(step, sheet, first[which.ravel() == kind], some)


class _Book:
    """The beats of every kind of pass."""

    def __init__(self, step: "SimulatedStep") -> None:
        self._run, self._layers = step.run, LayerSegments(step.run)
        self.table: PassTable = build_run_pass_table(step.run)
        self._chunks = {
            one.position: one for one in list_chunks(step.run.layout, step.run.model.layers)
        }

    def beats(self, kind: list[int], *, merge: bool = False) -> list[PassSpan]:
        """Return the beats of a pass, or of two that start together; by place in `_KINDS`."""
        op, chunk, other_op, other_chunk = kind
        passes: PassGroup = ((_KINDS[op], chunk),)
        if other_op >= 0:
            passes = (*passes, (_KINDS[other_op], other_chunk))
        both = get_group_breakdown(self._run, self.table, passes)
        apart = sum(self.table[one].ep for one in passes)
        left = both.ep / apart if apart else 0.0
        found = []
        for kind_of, at in passes:
            own: PassBreakdown = self.table[kind_of, at]
            name = kind_of[-1]
            segments = self._layers.list_segments(
                name, self._chunks[at], own._replace(ep=own.ep * left)
            )
            found.append(merge_layers(name, segments) if merge else segments)
        return build_pass_spans(found)


def _stamp(step: "SimulatedStep", sheet: SpanTable, places: Ints, beats: list[PassSpan]) -> None:
    """Put the beats of one kind of pass wherever such a pass runs."""
    actions = step.actions
    beats = [beat for beat in beats if beat.end > beat.start]
    if not beats:
        return
    whole = max(beat.end for beat in beats if beat.lane == COMPUTE)
    start, end = actions.start_s[places, None], actions.end_s[places, None]

    def moments(of_beats: list[float]) -> Floats:
        share = np.minimum(1.0, np.array(of_beats) / whole)
        found: Floats = np.where(share < 1, start + share * (end - start), end).ravel()
        return found

    times = len(places)
    member = np.array([beat.member for beat in beats])
    words = {
        column: np.tile(sheet.encode(column, [str(getattr(beat, column)) for beat in beats]), times)
        for column in ("lane", "kind", "name", "group", "collective")
    }
    sheet.add(
        moments([beat.start for beat in beats]),
        moments([beat.end for beat in beats]),
        process="gpu",
        stage=np.repeat(actions.rank[places], len(beats)),
        microbatch=actions.microbatch[places[:, None] + member].ravel(),
        layer=np.tile([beat.layer for beat in beats], times),
        bytes=np.tile([beat.nbytes for beat in beats], times),
        **words,
    )


def _add_waits(step: "SimulatedStep", sheet: SpanTable) -> None:
    """What the compute lane does between passes, before them and after them."""
    actions = step.actions
    own = np.flatnonzero(~actions.is_concurrent)
    rank, start, end = actions.rank[own], actions.start_s[own], actions.end_s[own]
    fresh = np.append(True, rank[1:] != rank[:-1])
    before = np.where(fresh, 0.0, np.append(0.0, end[:-1]))
    # A rank that has its input and still does not start waits for parameters.
    there = np.full(step.schedule.ranks, np.inf)
    np.minimum.at(there, step.transfers.target_rank, step.transfers.end_s)
    there[[route[0] for route in step.schedule.routes]] = 0.0
    ready = np.where(fresh, np.minimum(start, there[rank]), start)
    _wait(sheet, rank, before, ready, "wait for pp")
    _wait(sheet, rank, ready, start, WAIT_NAMES["dp"])
    every = np.arange(step.schedule.ranks)
    done = np.array(step.passes_end_s)
    reduced, update = done + np.array(step.exposed_grad_reduce_s), np.array(step.optimizer_s)
    update_start = np.array(step.update_start_s)
    _wait(sheet, every, done, reduced, WAIT_NAMES["dp"])
    _wait(sheet, every, reduced, update_start, "wait for other ranks")
    moved = update_start + np.array(step.offload_s)
    _wait(sheet, every, update_start, moved, WAIT_NAMES["host"])
    on_host = "optimizer" in step.run.layout.offload
    sheet.add(
        moved,
        moved + update,
        process="gpu",
        lane=COMPUTE,
        kind=(SpanKind.WAIT if on_host else SpanKind.COMPUTE).value,
        name="wait for the optimizer on the host" if on_host else "optimizer",
        stage=every,
    )
    if not skips_optimizer_barrier(step.run):
        end = np.full(len(every), step.step_s)
        _wait(sheet, every, moved + update, end, "wait for other ranks")


def _wait(sheet: SpanTable, stage: Ints, start: Floats, end: Floats, name: str) -> None:
    some = np.flatnonzero(end - start > 1e-9)
    sheet.add(
        start[some],
        end[some],
        process="gpu",
        lane=COMPUTE,
        kind=SpanKind.WAIT.value,
        name=name,
        stage=stage[some],
    )


def _add_exchange(step: "SimulatedStep", sheet: SpanTable) -> None:
    """Gathers of parameters and reductions of gradients."""
    layout = step.run.layout
    if not step.buckets:
        return
    rank, layer, gathers, share, start, end = (
        np.array(column) for column in zip(*step.buckets, strict=True)
    )
    held = np.array([one.total for one in count_trained_parameters(step.run)])
    number = np.where(gathers, 2, BYTES_PER_ELEMENT[layout.gradient_precision])
    scattered = layout.zero > 0 and step.run.framework.overlap_exchange
    reduction = "reduce_scatter" if scattered else "all_reduce"
    words = {
        column: sheet.encode(column, [reduction, "all_gather"])[gathers.astype(np.int64)]
        for column in ("name", "collective")
    }
    sheet.add(
        start,
        end,
        process="gpu",
        # Where gradients are scattered in every backward, those of the last have their own lane.
        lane=LANE_NAMES["dp"] if layout.zero != 2 else f"{LANE_NAMES['dp']}, once a step",
        kind=SpanKind.COMMUNICATION.value,
        stage=rank,
        layer=layer,
        bytes=np.rint(share * held[rank] * number).astype(np.int64),
        group="dp",
        **words,
    )


def _add_transfers(step: "SimulatedStep", sheet: SpanTable) -> None:
    """A send and a receive for every transfer."""
    sends = step.transfers
    flows = np.arange(len(sends.rank))
    way = 1 - sends.forward.astype(np.int64)
    source = sheet.encode(
        "lane", [f"comm pp receive from {rank}" for rank in range(step.schedule.ranks)]
    )
    for verb, stage, lane, flow in (
        ("send", sends.rank, "comm pp send", "flow_out"),
        ("receive", sends.target_rank, source[sends.rank], "flow_in"),
    ):
        names = [f"{verb} activations", f"{verb} gradients"]
        columns = {flow: flows, "lane": lane, "stage": stage}
        sheet.add(
            sends.start_s,
            sends.end_s,
            process="gpu",
            kind=SpanKind.COMMUNICATION.value,
            name=sheet.encode("name", names)[way],
            microbatch=sends.microbatch,
            bytes=step.transfer_bytes,
            collective="send" if verb == "send" else "recv",
            group="pp",
            **columns,
        )


def _in_flight(step: "SimulatedStep", first_gpu: Ints) -> dict[str, object]:
    """Chunk-microbatches every rank holds for its backwards, over time."""
    actions = step.actions
    held = actions.op == PASSES.index("F")
    freed = np.isin(actions.op, [PASSES.index("B"), PASSES.index("W")])
    rank = np.concatenate([actions.rank[held], actions.rank[freed]])
    time = np.concatenate([actions.start_s[held], actions.end_s[freed]])
    change = np.repeat([1.0, -1.0], [held.sum(), freed.sum()])
    order = np.lexsort((change, time, rank))
    return {
        "rank": first_gpu[rank[order]],
        "name": "chunk-microbatches in flight",
        "unit": "",
        "time_ns": np.rint(time[order] * 1e9).astype(np.int64),
        # Every rank ends with none, so the sum may run on over all ranks.
        "value": np.cumsum(change[order]),
    }
