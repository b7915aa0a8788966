"""How fast collectives should have been on the GPUs that a profile names.

The speed comes from `predict.network` on a catalog cluster with the same GPU, over the links that
the group crosses. Who shares a node is read from the devices that ranks use. A profile says nothing
of the fabric between nodes: the figure is firm inside a node, and beyond, or where nodes are not
told, it is marked as assumed.
"""

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from meshwright.errors import InputError
from meshwright.observe.analyze.collectives.matched_collectives import CollectiveSizeRow
from meshwright.timeline.timeline import Timeline

if TYPE_CHECKING:
    from meshwright.predict.network import NcclOp
    from meshwright.spec.cluster import Cluster

_OPS: "dict[str, NcclOp]" = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "all_gather": "all_gather",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
}


_FORM = re.compile(r"-(\d+g|sxm|pcie)\b")
"""What the catalog's names of GPUs say beside the model."""


class ExpectedCollective(NamedTuple):
    """What a kind and size of collective should have reached."""

    row: CollectiveSizeRow
    transfer_ns: float
    bus_bytes_per_s: float
    algorithm: str
    is_fabric_assumed: bool
    """Whether the group leaves its node, or may do so: the fabric is then the catalog's."""

    @property
    def achieved_share(self) -> float:
        """Bus bandwidth that was reached, as a part of what was expected."""
        return self.row.bus_bytes_per_s / self.bus_bytes_per_s


class NodePlacement(NamedTuple):
    """How ranks lie on nodes, as far as their devices tell."""

    ranks_per_node: tuple[int, ...]
    """How many ranks a node may have; none where devices tell nothing."""

    def is_intra_node(self, ranks: Sequence[int]) -> bool:
        """Whether these ranks share a node, however many ranks it has."""
        return bool(self.ranks_per_node) and all(
            len({rank // number for rank in ranks}) == 1 for number in self.ranks_per_node
        )


UNKNOWN_NODES = NodePlacement(())


def infer_node_placement(timeline: Timeline) -> NodePlacement:
    """Read from the devices that ranks use how many ranks a node has.

    Launchers number ranks node by node and give the n-th of a node its n-th device. So a number
    fits if every rank divided by it leaves the rank's device. A process that sees one device only
    shows nothing of its node.
    """
    listed = _devices(timeline)
    if len(listed) < 2:
        return UNKNOWN_NODES
    used = {}
    for part in timeline.split_by_rank():
        names = part.string_column("process")
        shown = [names.values[code] for code in np.unique(names.codes)]
        devices = {int(one[4:]) for one in shown if re.fullmatch(r"gpu \d{1,6}", one)}
        if len(devices) != 1:
            return UNKNOWN_NODES
        used[part.ranks[0]] = devices.pop()
    fitting = range(1 + max(used.values(), default=0), len(listed) + 1)
    return NodePlacement(
        tuple(n for n in fitting if all(rank % n == device for rank, device in used.items()))
    )


def _devices(timeline: Timeline) -> list[dict[str, Any]]:
    text = timeline.metadata.get("devices", "")
    try:
        return msgspec.json.decode(text, type=list[dict[str, Any]]) if text else []
    except msgspec.MsgspecError:
        return []


def find_catalog_cluster(timeline: Timeline) -> "Cluster | None":
    """Return a catalog cluster with the GPU that the profile names; None where it is not known."""
    devices = _devices(timeline)
    if not devices:
        return None
    from meshwright.spec import catalog

    name = str(devices[0].get("name", "")).lower()
    memory = float(devices[0].get("totalGlobalMem", 0) or 0)
    words = set(re.findall(r"[a-z0-9]+", name))
    fitting = [
        one
        for one in catalog.list_clusters().values()
        if set(_FORM.sub("", one.gpu.name).split("-")) <= words
        and all((form in words) == (form in one.gpu.name) for form in ("pcie", "nvl"))
    ]
    # Of a model's variants the one whose memory is nearest; of clusters, the catalog's first.
    return min(fitting, key=lambda one: abs(one.gpu.memory_bytes - memory), default=None)


def predict_expected_collectives(
    rows: Iterable[CollectiveSizeRow], cluster: "Cluster", nodes: NodePlacement = UNKNOWN_NODES
) -> tuple[ExpectedCollective, ...]:
    """Return what each row should have reached, where kind and size are known."""
    from meshwright.predict.network import (
        build_placement,
        build_strided_placement,
        predict_collective,
    )

    found = []
    for row in rows:
        if row.op not in _OPS or row.bytes <= 0 or row.num_ranks < 2:
            continue
        inside = row.num_ranks <= cluster.gpus_per_node and nodes.is_intra_node(row.member_ranks)
        try:
            if not inside and row.member_ranks and cluster.gpus_per_node in nodes.ranks_per_node:
                place = build_placement(
                    cluster.with_gpus(1 + max(row.member_ranks)), row.member_ranks
                )
            else:
                size = max(row.num_ranks, cluster.gpus_per_node)
                place = build_strided_placement(cluster.with_gpus(size), 0, row.num_ranks)
        except InputError:  # The catalog's cluster is smaller than the group.
            continue
        cost = predict_collective(place, _OPS[row.op], row.bytes)
        found.append(
            ExpectedCollective(
                row, cost.seconds * 1e9, cost.busbw_bytes_per_s, cost.algorithm, not inside
            )
        )
    return tuple(found)
