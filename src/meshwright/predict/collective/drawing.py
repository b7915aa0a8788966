"""Draws a simulated collective as a `Timeline`: a send and a receive for every move.

A rank has one lane per peer, channel and direction; moves that share a lane follow each other, as
they do on the wire. Switches that hold data are drawn as ranks behind the last one.
"""

from typing import TYPE_CHECKING

import numpy as np

from meshwright.timeline import Coded, Kind, Timeline

if TYPE_CHECKING:
    from meshwright.predict.collective.simulation import Simulated


def timeline_of(result: "Simulated") -> Timeline:
    """Return the spans of every move that was kept."""
    assert result.waves is not None
    waves = [wave for wave in result.waves if len(wave.moves)]
    if not waves:
        return Timeline.empty("simulated")
    table = np.concatenate([wave.moves.table for wave in waves]).astype(np.int64)
    source, target, slot, _, count, adds, channel, _ = table.T
    step = np.repeat([wave.step for wave in waves], [len(wave.moves) for wave in waves])
    start = np.concatenate([wave.start_s for wave in waves]) + result.base_s
    end = np.concatenate([wave.end_s for wave in waves]) + result.base_s
    start_ns = np.rint(start * 1e9).astype(np.int64)
    length_ns = np.maximum(np.rint(end * 1e9).astype(np.int64) - start_ns, 0)
    chunk_bytes = _chunk_bytes(result, count)
    flow = np.arange(len(table))
    none = np.full(len(table), -1)
    extra = _extras(step, slot, count)
    names = {"copy": 0, "add": 1}
    sides = (
        ("send", source, target, flow, none),
        ("receive", target, source, none, flow),
    )
    columns: dict[str, list[np.ndarray]] = {}
    lanes: dict[str, int] = {}
    for verb, rank, peer, flow_out, flow_in in sides:
        lane = _lanes(lanes, verb, peer, channel)
        parts = {
            "rank": rank,
            "lane": lane,
            "start_ns": start_ns,
            "duration_ns": length_ns,
            "name": adds,
            "bytes": chunk_bytes,
            "flow_out": flow_out,
            "flow_in": flow_in,
            "collective": np.full(len(table), 0 if verb == "send" else 1),
            "extra": np.arange(len(table)),
        }
        for name, values in parts.items():
            columns.setdefault(name, []).append(values)
    joined: dict[str, object] = {name: np.concatenate(parts) for name, parts in columns.items()}
    joined["lane"] = Coded(np.concatenate(columns["lane"]), list(lanes))
    joined["name"] = Coded(np.concatenate(columns["name"]), list(names))
    joined["collective"] = Coded(np.concatenate(columns["collective"]), ["send", "recv"])
    joined["extra"] = Coded(np.concatenate(columns["extra"]), extra)
    joined |= {"process": "gpu", "kind": Kind.COMMUNICATION.value, "group": result.op}
    metadata = {
        "collective": result.op,
        "algorithm": result.algorithm,
        "network": result.network,
        "ranks": str(result.ranks),
        "bytes": repr(result.nbytes),
        "seconds": repr(result.seconds),
    }
    return Timeline.from_columns(joined, source="simulated", metadata=metadata)


def _chunk_bytes(result: "Simulated", count: np.ndarray) -> np.ndarray:
    return np.rint(count * result.chunk_bytes).astype(np.int64)


def _lanes(known: dict[str, int], verb: str, peer: np.ndarray, channel: np.ndarray) -> np.ndarray:
    """Return the numbers of the lanes' names, made for each distinct peer and channel once."""
    word = "to" if verb == "send" else "from"
    pairs, which = np.unique(np.column_stack((peer, channel)), axis=0, return_inverse=True)
    numbers = [
        known.setdefault(f"{verb} {word} {one}, channel {lane}", len(known))
        for one, lane in pairs.tolist()
    ]
    return np.array(numbers)[which.reshape(-1)]


def _extras(step: np.ndarray, slot: np.ndarray, count: np.ndarray) -> list[str]:
    rows = zip(step.tolist(), slot.tolist(), count.tolist(), strict=True)
    return [f'{{"step":{one},"slot":{first},"chunks":{many}}}' for one, first, many in rows]
