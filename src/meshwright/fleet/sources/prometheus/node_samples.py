"""Samples of nodes: processors, memory, shared storage and the fabric, from their exporters.

Rates are the server's own, which knows how to go on where a counter began anew.
"""

from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.fleet.sources.prometheus.client import PrometheusClient
from meshwright.fleet.sources.prometheus.labels import parse_node, strip_port
from meshwright.fleet.sources.prometheus.query import PrometheusScope, QueryWindow
from meshwright.fleet.sources.prometheus.time_grid import (
    Floats,
    average_rows,
    format_promql_range,
    pad_rows,
)
from meshwright.fleet.sources.source import make_rows

_BY = "instance, node, nodename, hostname, Hostname, exported_node, kubernetes_node"
# Servers of a file system run the same exporter as its clients; only what clients do is asked for.
_CLIENT = 'component!~"ost|mdt|mgt|mds|oss|server"'
_METADATA = (
    'operation=~"open|close|stat|getattr|setattr|mknod|unlink|mkdir|rmdir|rename|readdir|getxattr'
    '|statfs|link"'
)
_GPFS_METADATA = 'operation=~"opens|closes|read_dir|inode_updates"'
_NFS_METADATA = (
    'method=~"(?i)(open|opennoattr|close|access|lookup|getattr|setattr|create|remove|rename'
    '|readdir|readdirplus)"'
)
_ETHERNET = 'device!~"lo|veth.*|docker.*|br-.*|cni.*|cali.*|flannel.*|tap.*|virbr.*|ib.*"'


class _Ask(NamedTuple):
    column: str
    metric: str
    matcher: str = ""
    how: str = "rate"
    """`rate`: the sum of rates; `share`: that of the rates of all modes; `value`: as it is."""


NODE_QUERIES: Final = (
    (_Ask("cpu_util", "node_cpu_seconds_total", 'mode!~"idle|iowait"', "share"),),
    (_Ask("io_wait", "node_cpu_seconds_total", 'mode="iowait"', "share"),),
    (_Ask("available", "node_memory_MemAvailable_bytes", how="value"),),
    (_Ask("memory_total", "node_memory_MemTotal_bytes", how="value"),),
    # Those of a group are added: a node may mount several kinds of shared storage.
    (
        _Ask("storage_read", "lustre_read_bytes_total", _CLIENT),
        _Ask("storage_read", "gpfs_perf_read_bytes_total"),
        _Ask("storage_read", "gpfs_perf_read_bytes"),
        _Ask("storage_read", "node_mountstats_nfs_total_read_bytes_total"),
    ),
    (
        _Ask("storage_write", "lustre_write_bytes_total", _CLIENT),
        _Ask("storage_write", "gpfs_perf_write_bytes_total"),
        _Ask("storage_write", "gpfs_perf_write_bytes"),
        _Ask("storage_write", "node_mountstats_nfs_total_write_bytes_total"),
    ),
    (
        _Ask("metadata_ops", "lustre_stats_total", f"{_CLIENT},{_METADATA}"),
        _Ask("metadata_ops", "gpfs_perf_operations_total", _GPFS_METADATA),
        _Ask("metadata_ops", "gpfs_perf_operations", _GPFS_METADATA),
        _Ask("metadata_ops", "node_nfs_requests_total", _NFS_METADATA),
    ),
)  # fmt: skip
_PORTS, _CARDS = "node_infiniband_port_data", "node_network"
_FABRIC: Final = (
    ("net_tx", f"{_PORTS}_transmitted_bytes_total", f"{_CARDS}_transmit_bytes_total"),
    ("net_rx", f"{_PORTS}_received_bytes_total", f"{_CARDS}_receive_bytes_total"),
)


def has_node_metrics(names: frozenset[str]) -> bool:
    """Tell whether a server has anything of nodes."""
    return any(ask.metric in names for group in NODE_QUERIES for ask in group)


def read_instance_names(
    server: PrometheusClient, fleet: PrometheusScope, start_s: float, end_s: float
) -> dict[str, str]:
    """Ask what nodes call themselves, by the address at which they are scraped."""
    if "node_uname_info" not in fleet.metric_names:
        return {}
    span = f"{round(max(end_s - start_s, 3600))}s"
    found = server.query_instant(
        f"last_over_time({fleet.build_selector('node_uname_info')}[{span}])", end_s
    )
    return {
        strip_port(each.labels.get("instance", "")): each.labels["nodename"]
        for each in found
        if each.labels.get("nodename")
    }


def read_node_samples(cut: QueryWindow) -> pa.Table:
    """Read the samples of nodes of a slice of time."""
    rows: dict[str, int] = {}
    columns: dict[str, Floats] = {}
    for group in NODE_QUERIES:
        for ask in group:
            if ask.metric in cut.scope.metric_names:
                _add(columns, ask.column, _laid(cut, ask, rows))
    for column, port, card in _FABRIC:
        # Nodes with InfiniBand send little else through their other cards.
        if port in cut.scope.metric_names:
            columns[column] = _laid(cut, _Ask(column, port), rows)
        elif card in cut.scope.metric_names:
            columns[column] = _laid(cut, _Ask(column, card, _ETHERNET), rows)
    columns = {name: pad_rows(values, len(rows)) for name, values in columns.items()}
    return _table(cut, list(rows), _derived(columns))


def _expression(fleet: PrometheusScope, ask: _Ask, step_s: float) -> str:
    metric = fleet.build_selector(ask.metric, ask.matcher)
    if ask.how == "value":
        return f"max by ({_BY}) (avg_over_time({metric}[{format_promql_range(step_s)}]))"
    span = fleet.format_rate_window(step_s)
    some = f"sum by ({_BY}) (rate({metric}[{span}]))"
    # Over all modes and not over the clock: at a restart and a beginning both are cut alike.
    whole = f"sum by ({_BY}) (rate({fleet.build_selector(ask.metric)}[{span}]))"
    return f"{some} / {whole}" if ask.how == "share" else some


def _laid(cut: QueryWindow, ask: _Ask, rows: dict[str, int]) -> Floats:
    answer = cut.query_range(_expression(cut.scope, ask, cut.grid.step_s))
    named = [(_node(series.labels, cut.scope), series) for series in answer]
    found = [(rows.setdefault(node, len(rows)), series) for node, series in named if node]
    return average_rows(cut.grid, len(rows), found)


def _node(labels: dict[str, str], fleet: PrometheusScope) -> str:
    """An address is a poor name: what the node calls itself at that address is a better one."""
    host = strip_port(labels.get("instance", ""))
    own = fleet.node_naming.node_by_instance.get(host)
    if own and not fleet.node_naming.node_label:
        return parse_node({"Hostname": own}, fleet.node_naming)
    return parse_node(labels, fleet.node_naming)


def _add(columns: dict[str, Floats], name: str, values: Floats) -> None:
    before = columns.get(name)
    if before is None:
        columns[name] = values
        return
    before = pad_rows(before, len(values))
    some = ~(np.isnan(before) & np.isnan(values))
    columns[name] = np.where(some, np.nan_to_num(before) + np.nan_to_num(values), np.nan)


def _derived(columns: dict[str, Floats]) -> dict[str, Floats]:
    available = columns.pop("available", None)
    if available is not None and "memory_total" in columns:
        columns["memory_used"] = columns["memory_total"] - available
    return columns


def _table(cut: QueryWindow, nodes: list[str], columns: dict[str, Floats]) -> pa.Table:
    some = np.zeros((len(nodes), cut.grid.num_points), dtype=bool)
    # A rate is made of samples further back, and is no sign that there was one in this step.
    measured = [columns[name] for name in ("memory_used", "memory_total") if name in columns]
    for values in measured or columns.values():
        some |= ~np.isnan(values)
    at, row = np.nonzero(some.T)
    return make_rows(
        "node_samples",
        {
            "cluster": pa.repeat(pa.scalar(cut.scope.cluster), len(row)),
            "node": pa.array(nodes, pa.string()).take(pa.array(row, pa.int64())),
            "time_s": cut.grid.times()[at],
            **{name: values[row, at] for name, values in columns.items()},
        },
    )
