"""What takes advice back: reboots, returns to service, exchanged devices, passed checks."""

import re
from collections import defaultdict
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.health.node_faults import NodeFault
from meshwright.fleet.health.xids import advise_xid

NodeKey = tuple[str, str]
"""Cluster and node."""
RECOVERY_KINDS: Final = ("boot", "checked")
"""Events that clear faults before them; `checked` is for whoever tests nodes, with code 0 where
the test was passed."""
_OUT: Final = ("down", "draining")
_PCI: Final = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}")


class RecoveryHistory:
    """When what was wrong with nodes ended."""

    def __init__(
        self, events: pa.Table, nodes: pa.Table | None, gpus: pa.Table | None, until_s: float
    ) -> None:
        self._boots: dict[NodeKey, list[float]] = defaultdict(list)
        self._checks: dict[NodeKey, list[float]] = defaultdict(list)
        self._quiet: dict[NodeKey, list[tuple[float, int | None, str]]] = defaultdict(list)
        self._returns: dict[NodeKey, list[float]] = defaultdict(list)
        self._changes: dict[NodeKey, list[tuple[float, int]]] = defaultdict(list)
        self._states: dict[NodeKey, tuple[float, str]] = {}
        self.down_events: list[tuple[NodeKey, float]] = []
        """Nodes that went down, and when."""
        self._take_events(events)
        if nodes is not None:
            self._take_nodes(nodes, until_s)
        if gpus is not None:
            self._take_gpus(gpus, until_s)

    def _take_events(self, events: pa.Table) -> None:
        told = pc.or_(
            pc.is_in(events["kind"], value_set=pa.array(RECOVERY_KINDS)),
            pc.fill_null(pc.and_(pc.equal(events["kind"], "xid"), pc.equal(events["code"], 154)),
                         False),
        )  # fmt: skip
        for row in events.filter(told).to_pylist():
            place = (row["cluster"], row["node"])
            if row["kind"] == "boot":
                self._boots[place].append(row["time_s"])
            elif row["kind"] == "checked":
                if row["code"] in (0, None):
                    self._checks[place].append(row["time_s"])
            elif advise_xid(154, row["text"] or "").action == "none":
                self._quiet[place].append((row["time_s"], row["gpu"], row["text"]))

    def _take_nodes(self, nodes: pa.Table, until_s: float) -> None:
        columns = ["cluster", "node", "since_s", "until_s", "state"]
        for row in nodes.select(columns).to_pylist():
            place, since_s = (row["cluster"], row["node"]), row["since_s"] or 0.0
            if since_s > until_s:
                continue
            ended = row["until_s"]
            if ended is not None and ended > until_s:
                ended = None
            if row["state"] in _OUT and ended is not None:
                self._returns[place].append(ended)
            if row["state"] == "down":
                self.down_events.append((place, since_s))
            if since_s >= self._states.get(place, (float("-inf"), ""))[0]:
                self._states[place] = (since_s, row["state"] if ended is None else "")

    def _take_gpus(self, gpus: pa.Table, until_s: float) -> None:
        """An index that becomes another device was exchanged."""
        seen: dict[tuple[str, str, int], str] = {}
        rows = gpus.select(["cluster", "node", "gpu", "uuid", "since_s"]).to_pylist()
        for row in sorted(rows, key=lambda one: one["since_s"] or 0.0):
            where = (row["cluster"], row["node"], row["gpu"])
            since_s = row["since_s"] or 0.0
            if row["uuid"] is None or since_s > until_s:
                continue
            if seen.get(where, row["uuid"]) != row["uuid"]:
                self._changes[where[0], where[1]].append((since_s, row["gpu"]))
            seen[where] = row["uuid"]

    def find_node_state(self, place: NodeKey) -> str:
        """Return how the scheduler has a node now; empty where nobody tells."""
        return self._states.get(place, (0.0, ""))[1]

    def list_nodes(self) -> set[NodeKey]:
        """Return the nodes that the scheduler knows."""
        return set(self._states)

    def was_checked_after(self, place: NodeKey, time_s: float) -> bool:
        """Say whether a node has been tested, or got another device, since a moment."""
        changes = [when for when, _ in self._changes[place]]
        return any(when > time_s for when in (*self._checks[place], *changes))

    def is_cleared(self, fault: NodeFault) -> bool:
        """Say whether what a fault called for has been done since."""
        place = (fault.cluster, fault.node)
        after = fault.last_s
        changed = [
            when for when, gpu in self._changes[place] if fault.gpu is None or gpu == fault.gpu
        ]
        ends = [*self._checks[place], *changed]
        if fault.advice.repair in ("reset", "reboot"):
            ends += [*self._boots[place], *self._returns[place]]
        if fault.advice.repair == "reset":
            ends += [
                when
                for when, gpu, text in self._quiet[place]
                # Logs of kernels tell devices by address, which stands first in the text.
                if (gpu is not None and gpu == fault.gpu) or _address(text) == _address(fault.text)
            ]
        return any(when > after for when in ends)


def _address(text: str) -> str:
    found = _PCI.match(text)
    return found[0] if found else text
