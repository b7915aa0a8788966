"""Draws a simulated step as a `Timeline`: passes, exposed communication, transfers, update.

One rank stands for each pipeline stage: the stage's first GPU, by its global number. A pass shows
its compute on the lane `compute` and then what it waits for on a lane per kind of communication;
transfers are a send on one rank and a receive on the other, tied by a flow.
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.predict.simulate_passes import Pieces
from meshwright.spec.layout import chunks, rank_parameters
from meshwright.spec.layout.ranks import Coordinate, rank_of
from meshwright.spec.layout.states import STATE_BYTES
from meshwright.timeline import Coded, Kind, Timeline

if TYPE_CHECKING:
    from meshwright.predict.simulate import SimulatedStep

NAMES = ("forward", "backward", "backward-input", "backward-weight")
"""What a pass is called, in the order of `PASSES`."""

_WAITS = {
    "tp": "tensor parallel",
    "cp": "context parallel",
    "ep": "expert exchange",
    "dp": "parameter sharding",
}
_MISSING = -1


class _Spans(NamedTuple):
    """Some spans of one kind: columns of equal length, or one value for all."""

    lane: Any
    kind: Kind
    name: Any
    stage: Any
    start_s: npt.NDArray[np.float64]
    end_s: npt.NDArray[np.float64]
    microbatch: Any = _MISSING
    layer: Any = _MISSING
    extra: Any = None
    flow_out: Any = _MISSING
    flow_in: Any = _MISSING
    nbytes: Any = _MISSING
    collective: str = ""
    group: str = ""


def timeline_of(step: "SimulatedStep") -> Timeline:
    """Return every span of a simulated step."""
    parts = [
        part for part in (*_passes(step), *_transfers(step), *_ends(step)) if len(part.start_s)
    ]
    layout = step.run.layout
    first_gpu = np.array([rank_of(layout, Coordinate(0, 0, 0, pp)) for pp in range(layout.pp)])
    stage = _column(parts, "stage")
    start = np.rint(_column(parts, "start_s") * 1e9).astype(np.int64)
    end = np.rint(_column(parts, "end_s") * 1e9).astype(np.int64)
    columns = {
        "rank": first_gpu[stage],
        "process": "gpu",
        "lane": _labels(parts, "lane"),
        "start_ns": start,
        "duration_ns": end - start,
        "kind": _labels(parts, "kind"),
        "name": _labels(parts, "name"),
        "flow_out": _column(parts, "flow_out"),
        "flow_in": _column(parts, "flow_in"),
        "bytes": _column(parts, "nbytes"),
        "collective": _labels(parts, "collective"),
        "group": _labels(parts, "group"),
        "stage": stage,
        "microbatch": _column(parts, "microbatch"),
        "layer": _column(parts, "layer"),
        "extra": [one for part in parts for one in _texts(part)],
    }
    metadata = {
        "model": step.run.model.name,
        "cluster": step.run.cluster.name,
        "gpus": str(layout.gpus),
        "schedule": step.schedule.kind,
        "step_s": repr(step.step_s),
        "ranks": "one per pipeline stage, its first GPU; all others of the stage do the same",
        "stages": str(layout.pp),
    }
    return Timeline.from_columns(columns, source="simulated", metadata=metadata)


def _passes(step: "SimulatedStep") -> list[_Spans]:
    """Recompute, compute and waits of every pass, one after the other."""
    actions = step.actions
    held = {one.position: one for one in chunks(step.run.layout, step.run.model.layers)}
    first = np.array([held[position].first for position in sorted(held)])
    texts = np.array(
        [
            f'{{"chunk":{one},"layers":[{held[one].first},{held[one].last}]}}'
            for one in sorted(held)
        ],
        dtype=object,
    )
    moments = actions.start_s[:, None] + np.cumsum(actions.pieces_s, axis=1)
    moments = np.minimum(np.column_stack([actions.start_s, moments]), actions.end_s[:, None])
    spans = []
    for column, piece in enumerate(Pieces._fields):
        some = np.flatnonzero(actions.pieces_s[:, column] > 0)
        chunk = actions.chunk[some]
        wait = _WAITS.get(piece)
        beside = np.where(actions.joined[some], "compute beside", "compute")
        name: Any = wait or np.array(NAMES)[actions.op[some]]
        spans.append(
            _Spans(
                lane=beside if wait is None else wait,
                kind=Kind.COMPUTE if wait is None else Kind.COMMUNICATION,
                name="recompute" if piece == "recompute" else name,
                stage=actions.rank[some],
                start_s=moments[some, column],
                end_s=moments[some, column + 1],
                microbatch=actions.microbatch[some],
                layer=first[chunk],
                extra=texts[chunk],
                group="" if wait is None else piece,
            )
        )
    return spans


def _transfers(step: "SimulatedStep") -> list[_Spans]:
    """A send and a receive for every transfer."""
    sends = step.sends
    flows = np.arange(len(sends.rank))
    way = np.where(sends.forward, "activations", "gradients")
    shared: dict[str, Any] = {
        "kind": Kind.COMMUNICATION,
        "start_s": sends.start_s,
        "end_s": sends.end_s,
        "microbatch": sends.microbatch,
        "nbytes": step.sent_bytes,
        "group": "pp",
    }
    source = np.array([f"pipeline receive from {rank}" for rank in range(step.schedule.ranks)])
    return [
        _Spans(
            lane="pipeline send",
            name=np.char.add("send ", way),
            stage=sends.rank,
            flow_out=flows,
            collective="send",
            **shared,
        ),
        _Spans(
            lane=source[sends.rank],
            name=np.char.add("receive ", way),
            stage=sends.to,
            flow_in=flows,
            collective="recv",
            **shared,
        ),
    ]


def _ends(step: "SimulatedStep") -> list[_Spans]:
    """The exchange of gradients after the last backward, and the update."""
    layout, every = step.run.layout, np.arange(step.schedule.ranks)
    exchange, done = np.array(step.exchange_s), np.array(step.done_s)
    update = np.array(step.optimizer_s)
    held = rank_parameters(layout, step.run.model)
    number = STATE_BYTES[layout.gradient_precision]
    size = np.array([round(one.total * number) for one in held])
    some, updated = np.flatnonzero(exchange > 0), np.flatnonzero(update > 0)
    start = np.full(len(updated), step.update_start_s)
    return [
        _Spans(
            lane="data parallel",
            kind=Kind.COMMUNICATION,
            name="gradient exchange",
            stage=every[some],
            start_s=done[some],
            end_s=done[some] + exchange[some],
            nbytes=size[some],
            collective="all_reduce" if layout.zero == 0 else "reduce_scatter",
            group="dp-cp",
        ),
        _Spans(
            lane="compute",
            kind=Kind.COMPUTE,
            name="optimizer",
            stage=every[updated],
            start_s=start,
            end_s=start + update[updated],
        ),
    ]


def _column(parts: list[_Spans], name: str) -> npt.NDArray[Any]:
    return np.concatenate(
        [np.broadcast_to(getattr(part, name), part.start_s.shape) for part in parts]
    )


def _labels(parts: list[_Spans], name: str) -> Coded:
    """Code the strings of one column; an empty one is no value."""
    values, codes = np.unique(_column(parts, name).astype(str), return_inverse=True)
    texts = [str(value) for value in values]
    if "" in texts:
        codes = np.where(codes == texts.index(""), _MISSING, codes)
    return Coded(codes, texts)


def _texts(part: _Spans) -> list[str | None]:
    return [None] * len(part.start_s) if part.extra is None else list(part.extra)
