"""Faults of nodes: events that belong together made one, with what each calls for.

Events of one device, kind and number that follow each other within an hour are one fault: a GPU
that repeats the same line a thousand times failed once.
"""

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.health.xids import (
    NONE,
    REBOOT,
    REPAIR_STEPS,
    REPLACE,
    RESET,
    WATCH,
    FaultAdvice,
    advise_xid,
    find_xid,
)
from meshwright.fleet.sources.kernel.messages import is_fatal

Ints = npt.NDArray[np.int64]

MAX_EVENT_GAP_S: Final = 3600.0
"""Events further apart are two faults."""
EVENT_COLUMNS: Final = ("cluster", "node", "gpu", "time_s", "kind", "code", "count", "text")
COUNTER_KINDS: Final = ("ecc_corrected", "pcie", "nvlink", "infiniband", "row_remap")
"""Kinds of which a few mean nothing, and far more than others have mean a lot."""
_BY_TEXT: Final = ("row_remap", "infiniband", "nvswitch", "xid")
"""Kinds of which the text says how grave it is."""

ACTION_WEIGHTS: Final = {"drain": 0.9, "watch": 0.2, "none": 0.0}
"""By how much a fault lowers the score on the day it happens."""
_HEAVIER: Final = {"ecc": 0.5, "host_memory": 0.5}
_LIGHTER: Final = {"nvswitch": 0.05, "row_remap": 0.1, "pcie": 0.0, "nvlink": 0.0,
                   "ecc_corrected": 0.0, "infiniband": 0.0}  # fmt: skip
_LINK_DOWN: Final = ("went down", "link down", "health compromised", "device is dead")


class NodeFault(NamedTuple):
    """One fault of a node or of one of its GPUs."""

    cluster: str
    node: str
    gpu: int | None
    kind: str
    code: int | None
    first_s: float
    last_s: float
    num_times: float
    text: str
    advice: FaultAdvice
    weight: float

    @property
    def description(self) -> str:
        """Say in a few words what happened."""
        if self.kind == "xid" and self.code is not None:
            return f"Xid {self.code}: {find_xid(self.code).meaning}"
        words = {
            "ecc": "uncorrected memory errors", "nvswitch": f"NVSwitch error (SXid {self.code})",
            "pcie_fatal": "fatal PCI Express errors", "host_memory": "uncorrected host memory",
            "row_remap": "rows of memory remapped", "infiniband": "InfiniBand link errors",
        }  # fmt: skip
        told = words.get(self.kind, self.kind)
        return f"{told}: {self.text[:80]}" if self.kind in ("row_remap", "infiniband") else told

    @property
    def action_text(self) -> str:
        """Say what the operator does about it."""
        known = find_xid(self.code) if self.kind == "xid" and self.code is not None else None
        told = f" (NVIDIA: {known.immediate_action})" if known and known.immediate_action else ""
        return REPAIR_STEPS[self.advice.repair] + told if self.advice.repair else ""


def advise_event(kind: str, code: int | None, text: str) -> FaultAdvice:
    """Say what an event calls for."""
    if kind == "xid":
        return advise_xid(code, text) if code is not None else WATCH
    if kind == "nvswitch":
        return RESET if is_fatal(text) else WATCH
    if kind == "pcie_fatal":
        return REBOOT
    if kind == "row_remap":
        return REPLACE if "could not be remapped" in text else WATCH
    return WATCH if kind in ("ecc", "host_memory", "infiniband") else NONE


def weigh_event(kind: str, code: int | None, verdict: FaultAdvice, text: str) -> float:
    """Say by how much of itself an event lowers a score."""
    if verdict.action != "watch":
        return ACTION_WEIGHTS[verdict.action]
    if kind == "xid" and code is not None and find_xid(code).immediate_action == "IGNORE":
        return 0.1
    if kind == "infiniband" and any(word in text.lower() for word in _LINK_DOWN):
        return ACTION_WEIGHTS["watch"]
    if kind == "row_remap" and "wait for a reset" in text:
        return 0.3
    return _HEAVIER.get(kind, _LIGHTER.get(kind, ACTION_WEIGHTS["watch"]))


def merge_events(events: pa.Table) -> tuple[NodeFault, ...]:
    """Make faults of events; what calls for nothing is left out."""
    if not events.num_rows:
        return ()
    rows = events.combine_chunks()
    key, time_s = _keys(rows), rows["time_s"].to_numpy()
    order = np.lexsort((time_s, key))
    key, time_s = key[order], time_s[order]
    begins = np.append(True, (key[1:] != key[:-1]) | (np.diff(time_s) > MAX_EVENT_GAP_S))
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(key)) - 1
    counts = np.nan_to_num(rows["count"].to_numpy().astype(np.float64), nan=1.0)[order]
    totals = np.add.reduceat(counts, first)
    told = rows.take(pa.array(order[last])).to_pylist()
    found = []
    for at, row in enumerate(told):
        text = row["text"] or ""
        verdict = advise_event(row["kind"], row["code"], text)
        weight = weigh_event(row["kind"], row["code"], verdict, text)
        if verdict.action != "none" and weight > 0:
            found.append(
                NodeFault(row["cluster"], row["node"], row["gpu"], row["kind"], row["code"],
                      float(time_s[first[at]]), float(time_s[last[at]]), float(totals[at]),
                      text, verdict, weight)
            )  # fmt: skip
    return tuple(sorted(found, key=lambda one: (one.last_s, one.cluster, one.node, one.kind)))


def _keys(rows: pa.Table) -> Ints:
    """Number what belongs together: device, kind, number and, where it matters, the text."""
    grave = pc.is_in(rows["kind"], value_set=pa.array(_BY_TEXT))
    text = pc.if_else(grave, pc.fill_null(rows["text"], ""), "")
    # What a program did and to which address differs from line to line, and makes no other fault.
    text = pc.replace_substring_regex(text, r"pid=\S*,? ?|name=[^,]*,? ?|0x[0-9a-fA-F]+", "")
    plain = pc.and_(
        pc.equal(rows["kind"], "xid"),
        pc.invert(pc.is_in(pc.fill_null(rows["code"], -1), value_set=pa.array(_TOLD, pa.int32()))),
    )
    text = pc.if_else(plain, "", text)
    key = np.zeros(rows.num_rows, dtype=np.int64)
    for column in (rows["cluster"], rows["node"], rows["gpu"], rows["kind"], rows["code"], text):
        codes = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        coded = pc.fill_null(codes.dictionary_encode().indices, -1).to_numpy() + 1
        key = np.unique(key * (int(coded.max(initial=0)) + 1) + coded, return_inverse=True)[1]
    return key.astype(np.int64)


_TOLD: Final = (*range(144, 151), 154)
"""Xids of which the text says how grave they are."""
