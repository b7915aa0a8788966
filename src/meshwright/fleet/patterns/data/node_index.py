"""The nodes of a fleet, numbered: the same node has the same number in every table."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from meshwright.fleet.columns import CodedColumn, read_text
from meshwright.fleet.patterns.data.group_math import Ints


class NodeIndex(NamedTuple):
    """Names of nodes, and their numbers."""

    names: tuple[str, ...]
    """With their cluster before them, where there are several."""
    index_by_name: Mapping[tuple[str, str], int]
    """By cluster and name."""

    @classmethod
    def from_tables(cls, tables: Mapping[str, Any]) -> "NodeIndex":
        """Every node that a table names."""
        found: dict[tuple[str, str], int] = {}
        for name in ("nodes", "allocations", "node_samples", "gpu_samples", "events"):
            table = tables[name]
            cluster, node = read_text(table, "cluster"), read_text(table, "node")
            width = len(node.values) + 1
            for code in np.unique((cluster.codes + 1) * width + node.codes + 1).tolist():
                of, at = code // width - 1, code % width - 1
                if at >= 0:
                    key = (cluster.values[of] if of >= 0 else "", node.values[at])
                    found.setdefault(key, len(found))
        jobs = tables["jobs"]
        if jobs.num_rows:
            for cluster_name, nodes in _job_nodes(jobs):
                for node_name in nodes:
                    found.setdefault((cluster_name, node_name), len(found))
        alone = len({cluster for cluster, _ in found}) == 1
        names = tuple(node if alone else f"{cluster}/{node}" for cluster, node in found)
        return cls(names, found)

    @property
    def num_nodes(self) -> int:
        """How many there are."""
        return len(self.names)

    @property
    def clusters(self) -> tuple[str, ...]:
        """The cluster of each."""
        return tuple(cluster for cluster, _ in self.index_by_name)

    def codes(self, table: Any) -> Ints:
        """The node of each row; -1 where there is none or it is not known."""
        cluster, node = read_text(table, "cluster"), read_text(table, "node")
        return self._codes(cluster.codes, node.codes, cluster.values, node.values)

    def from_text(self, clusters: CodedColumn, rows: Ints, nodes: CodedColumn) -> Ints:
        """The same for flat names of nodes, each with the row that its cluster stands in."""
        return self._codes(clusters.codes[rows], nodes.codes, clusters.values, nodes.values)

    def _codes(self, of: Ints, at: Ints, clusters: tuple[str, ...], nodes: tuple[str, ...]) -> Ints:
        known = np.full((len(clusters) + 1) * (len(nodes) + 1), -1, dtype=np.int64)
        width = len(nodes) + 1
        for place, cluster in enumerate(("", *clusters)):
            for index, node in enumerate(nodes):
                known[place * width + index + 1] = self.index_by_name.get((cluster, node), -1)
        found: Ints = known[(of + 1) * width + at + 1]
        return found


def _job_nodes(jobs: Any) -> list[tuple[str, tuple[str, ...]]]:
    """The distinct nodes of jobs, by cluster."""
    found = []
    cluster = read_text(jobs, "cluster")
    import pyarrow.compute as pc

    for code, name in enumerate(cluster.values or ("",)):
        own = jobs.filter(cluster.codes == code) if cluster.values else jobs
        flat = pc.unique(pc.list_flatten(own.column("nodes")))
        found.append((name, tuple(one for one in flat.to_pylist() if one)))
    return found
