"""How fast collectives should have been on the GPUs that a profile names.

The speed comes from `predict.network` on a catalog cluster with the same GPU. A profile says
nothing of the fabric between nodes, so the figure is firm inside a node and a guide beyond.
"""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from meshwright.observe.analyze.collectives import SizeRow
from meshwright.timeline.timeline import Timeline

if TYPE_CHECKING:
    from meshwright.predict.network import Op
    from meshwright.spec.cluster import Cluster

_OPS: "dict[str, Op]" = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
}


class Expected(NamedTuple):
    """What a kind and size of collective should have reached."""

    row: SizeRow
    transfer_ns: float
    bus_bytes_per_s: float
    algorithm: str

    @property
    def reached(self) -> float:
        """Bus bandwidth that was reached, as a part of what was expected."""
        return self.row.bus_bytes_per_s / self.bus_bytes_per_s


def cluster_of(timeline: Timeline) -> "Cluster | None":
    """Return a catalog cluster with the GPU that the profile names; None where it is not known."""
    text = timeline.metadata.get("devices", "")
    try:
        devices = msgspec.json.decode(text, type=list[dict[str, Any]]) if text else []
    except msgspec.MsgspecError:
        return None
    if not devices:
        return None
    from meshwright.spec import catalog

    name = str(devices[0].get("name", "")).lower()
    memory = float(devices[0].get("totalGlobalMem", 0) or 0)
    words = set(re.findall(r"[a-z0-9]+", name))
    fitting = [
        one
        for one in catalog.clusters().values()
        if one.gpu.name.split("-")[0] in words and ("pcie" in words) == ("pcie" in one.gpu.name)
    ]
    # Of a model's variants the one whose memory is nearest; of clusters, the catalog's first.
    return min(fitting, key=lambda one: abs(one.gpu.memory_bytes - memory), default=None)


def expected(rows: Iterable[SizeRow], cluster: "Cluster") -> tuple[Expected, ...]:
    """Return what each row should have reached, where kind and size are known."""
    from meshwright.predict.network import collective, strided

    found = []
    for row in rows:
        if row.op not in _OPS or row.bytes <= 0 or row.ranks < 2:
            continue
        size = cluster.with_gpus(max(row.ranks, cluster.gpus_per_node))
        cost = collective(strided(size, 0, row.ranks), _OPS[row.op], row.bytes)
        found.append(Expected(row, cost.seconds * 1e9, cost.busbw_bytes_per_s, cost.algorithm))
    return tuple(found)
