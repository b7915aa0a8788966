"""Draws a simulated step as a `Timeline`: kernels, collectives, transfers, waits, the update.

One rank stands for each pipeline stage: the stage's first GPU, by its global number. Its lane
`compute` has a kernel or a wait for every moment of the step. Collectives run on a lane per kind of
parallelism with their full length, beside compute where they hide; transfers are a send on one
rank and a receive on the other, tied by a flow. The host's lane names the passes.
"""

from typing import TYPE_CHECKING

import numpy as np

from meshwright.policy.pipeline.spans import BESIDE, LANE, NAMES, PROCESS, span_details
from meshwright.predict.adapters import trained_parameters
from meshwright.predict.bubble import ends_apart
from meshwright.predict.pass_time import LAST, Passes, PassTable, Pieces, together
from meshwright.predict.simulate_beats import COMPUTE, LANES, Beat, lay_out, merged
from meshwright.predict.simulate_layers import Layers
from meshwright.predict.simulate_passes import PASSES, Ints, ends_differ, table_of
from meshwright.predict.simulate_sheet import Floats, Sheet
from meshwright.spec.layout import chunks
from meshwright.spec.layout.ranks import Coordinate, rank_of
from meshwright.spec.layout.states import STATE_BYTES
from meshwright.timeline import Kind, Timeline

if TYPE_CHECKING:
    from meshwright.predict.simulate import SimulatedStep


def timeline_of(step: "SimulatedStep", most_layer_spans: int) -> Timeline:
    """Return every span of a simulated step.

    Passes are drawn layer by layer unless that takes more spans than allowed.
    """
    sheet = Sheet()
    _add_host(step, sheet)
    _add_passes(step, sheet, most_layer_spans)
    _add_waits(step, sheet)
    _add_exchange(step, sheet)
    _add_transfers(step, sheet)
    layout = step.run.layout
    first_gpu = np.array([rank_of(layout, Coordinate(0, 0, 0, pp)) for pp in range(layout.pp)])
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
        sheet.columns(first_gpu), _in_flight(step, first_gpu), source="simulated", metadata=metadata
    )


def _add_host(step: "SimulatedStep", sheet: Sheet) -> None:
    """The passes by name, as a trainer would mark them."""
    actions, model = step.actions, step.run.model
    held = {one.position: one for one in chunks(step.run.layout, model.layers)}
    texts = [span_details(held[at]) for at in sorted(held)]
    first = np.array([held[at].first for at in sorted(held)])
    lanes = sheet.codes("lane", [LANE, BESIDE])
    sheet.add(
        actions.start_s,
        actions.end_s,
        process=PROCESS,
        lane=lanes[actions.joined.astype(np.int64)],
        kind=Kind.HOST.value,
        name=sheet.codes("name", [NAMES[op] for op in PASSES])[actions.op],
        stage=actions.rank,
        microbatch=actions.microbatch,
        layer=first[actions.chunk],
        extra=sheet.codes("extra", texts)[actions.chunk],
    )


_KINDS = (*PASSES, *LAST.values())
"""What passes are told apart by."""


def _kinds_of(step: "SimulatedStep", table: PassTable) -> Ints:
    """Return every action's index into `_KINDS`."""
    actions, kinds = step.actions, step.actions.op.copy()
    if ends_differ(table):
        for op, last in LAST.items():
            some = np.flatnonzero(actions.op == PASSES.index(op))
            # Later ones of the same rank and chunk take the place of those before them.
            ends = dict(
                zip(zip(actions.rank[some], actions.chunk[some], strict=True), some, strict=True)
            )
            kinds[list(ends.values())] = _KINDS.index(last)
    return kinds


def _add_passes(step: "SimulatedStep", sheet: Sheet, most_layer_spans: int) -> None:
    """What passes consist of: the beats of their kind, stretched to their length."""
    actions, book = step.actions, _Book(step)
    ops = _kinds_of(step, book.table)
    first = np.flatnonzero(~actions.joined)
    second = np.minimum(first + 1, len(actions.rank) - 1)
    paired = actions.joined[second] & (second > first)
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
        self._run, self._layers = step.run, Layers(step.run)
        self.table: PassTable = table_of(step.run)
        self._chunks = {one.position: one for one in chunks(step.run.layout, step.run.model.layers)}

    def beats(self, kind: list[int], *, merge: bool = False) -> list[Beat]:
        """Return the beats of a pass, or of two that start together; by place in `_KINDS`."""
        op, chunk, other_op, other_chunk = kind
        passes: Passes = ((_KINDS[op], chunk),)
        if other_op >= 0:
            passes = (*passes, (_KINDS[other_op], other_chunk))
        both = together(self._run, self.table, passes)
        apart = sum(self.table[one].ep for one in passes)
        left = both.ep / apart if apart else 0.0
        found = []
        for kind_of, at in passes:
            own: Pieces = self.table[kind_of, at]
            name = kind_of[-1]
            segments = self._layers.segments(name, self._chunks[at], own._replace(ep=own.ep * left))
            found.append(merged(name, segments) if merge else segments)
        return lay_out(found)


def _stamp(step: "SimulatedStep", sheet: Sheet, places: Ints, beats: list[Beat]) -> None:
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
        column: np.tile(sheet.codes(column, [str(getattr(beat, column)) for beat in beats]), times)
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


def _add_waits(step: "SimulatedStep", sheet: Sheet) -> None:
    """What the compute lane does between passes, before them and after them."""
    actions = step.actions
    own = np.flatnonzero(~actions.joined)
    rank, start, end = actions.rank[own], actions.start_s[own], actions.end_s[own]
    fresh = np.append(True, rank[1:] != rank[:-1])
    before = np.where(fresh, 0.0, np.append(0.0, end[:-1]))
    # A rank that has its input and still does not start waits for parameters.
    there = np.full(step.schedule.ranks, np.inf)
    np.minimum.at(there, step.sends.to, step.sends.end_s)
    there[[route[0] for route in step.schedule.routes]] = 0.0
    ready = np.where(fresh, np.minimum(start, there[rank]), start)
    _wait(sheet, rank, before, ready, "wait for pipeline")
    _wait(sheet, rank, ready, start, f"wait for {LANES['dp']}")
    every = np.arange(step.schedule.ranks)
    done = np.array(step.done_s)
    reduced, update = done + np.array(step.exchange_s), np.array(step.optimizer_s)
    update_start = np.array(step.update_start_s)
    _wait(sheet, every, done, reduced, f"wait for {LANES['dp']}")
    _wait(sheet, every, reduced, update_start, "wait for other ranks")
    moved = update_start + np.array(step.offload_s)
    _wait(sheet, every, update_start, moved, f"wait for {LANES['host']}")
    on_host = "optimizer" in step.run.layout.offload
    sheet.add(
        moved,
        moved + update,
        process="gpu",
        lane=COMPUTE,
        kind=(Kind.WAIT if on_host else Kind.COMPUTE).value,
        name="wait for the optimizer on the host" if on_host else "optimizer",
        stage=every,
    )
    if not ends_apart(step.run):
        end = np.full(len(every), step.step_s)
        _wait(sheet, every, moved + update, end, "wait for other ranks")


def _wait(sheet: Sheet, stage: Ints, start: Floats, end: Floats, name: str) -> None:
    some = np.flatnonzero(end - start > 1e-9)
    sheet.add(
        start[some],
        end[some],
        process="gpu",
        lane=COMPUTE,
        kind=Kind.WAIT.value,
        name=name,
        stage=stage[some],
    )


def _add_exchange(step: "SimulatedStep", sheet: Sheet) -> None:
    """Gathers of parameters and reductions of gradients."""
    layout = step.run.layout
    if not step.buckets:
        return
    rank, layer, gathers, share, start, end = (
        np.array(column) for column in zip(*step.buckets, strict=True)
    )
    held = np.array([one.total for one in trained_parameters(step.run)])
    number = np.where(gathers, 2, STATE_BYTES[layout.gradient_precision])
    scattered = layout.zero > 0 and step.run.software.overlap_exchange
    reduction = "reduce_scatter" if scattered else "all_reduce"
    words = {
        column: sheet.codes(column, [reduction, "all_gather"])[gathers.astype(np.int64)]
        for column in ("name", "collective")
    }
    sheet.add(
        start,
        end,
        process="gpu",
        # Where gradients are scattered in every backward, those of the last have their own lane.
        lane=LANES["dp"] if layout.zero != 2 else f"{LANES['dp']}, once a step",
        kind=Kind.COMMUNICATION.value,
        stage=rank,
        layer=layer,
        bytes=np.rint(share * held[rank] * number).astype(np.int64),
        group="dp",
        **words,
    )


def _add_transfers(step: "SimulatedStep", sheet: Sheet) -> None:
    """A send and a receive for every transfer."""
    sends = step.sends
    flows = np.arange(len(sends.rank))
    way = 1 - sends.forward.astype(np.int64)
    source = sheet.codes(
        "lane", [f"pipeline receive from {rank}" for rank in range(step.schedule.ranks)]
    )
    for verb, stage, lane, flow in (
        ("send", sends.rank, "pipeline send", "flow_out"),
        ("receive", sends.to, source[sends.rank], "flow_in"),
    ):
        names = [f"{verb} activations", f"{verb} gradients"]
        columns = {flow: flows, "lane": lane, "stage": stage}
        sheet.add(
            sends.start_s,
            sends.end_s,
            process="gpu",
            kind=Kind.COMMUNICATION.value,
            name=sheet.codes("name", names)[way],
            microbatch=sends.microbatch,
            bytes=step.sent_bytes,
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
