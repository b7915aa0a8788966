"""Samples of nodes: processors, memory, shared storage and the fabric, from their exporters.

Rates are the server's own, which knows how to go on where a counter began anew.
"""

from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.observe.fleet.sources.prometheus.asking import Fleet, Slice
from meshwright.observe.fleet.sources.prometheus.client import Prometheus
from meshwright.observe.fleet.sources.prometheus.grid import Floats, mean_of_rows, padded, window
from meshwright.observe.fleet.sources.prometheus.labels import host_of, node_of
from meshwright.observe.fleet.sources.source import rows_of

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


ASKS: Final = (
    (_Ask("cpu_util", "node_cpu_seconds_total", 'mode!~"idle|iowait"', "share"),),
    (_Ask("io_wait", "node_cpu_seconds_total", 'mode="iowait"', "share"),),
    (_Ask("available", "node_memory_MemAvailable_bytes", how="value"),),
    (_Ask("memory_total", "node_memory_MemTotal_bytes", how="value"),),
    # Those of a group are added: a node may mount several kinds of shared storage.
    (
        _Ask("read", "lustre_read_bytes_total", _CLIENT),
        _Ask("read", "gpfs_perf_read_bytes_total"),
        _Ask("read", "gpfs_perf_read_bytes"),
        _Ask("read", "node_mountstats_nfs_total_read_bytes_total"),
    ),
    (
        _Ask("written", "lustre_write_bytes_total", _CLIENT),
        _Ask("written", "gpfs_perf_write_bytes_total"),
        _Ask("written", "gpfs_perf_write_bytes"),
        _Ask("written", "node_mountstats_nfs_total_write_bytes_total"),
    ),
    (
        _Ask("metadata", "lustre_stats_total", f"{_CLIENT},{_METADATA}"),
        _Ask("metadata", "gpfs_perf_operations_total", _GPFS_METADATA),
        _Ask("metadata", "gpfs_perf_operations", _GPFS_METADATA),
        _Ask("metadata", "node_nfs_requests_total", _NFS_METADATA),
    ),
)  # fmt: skip
_PORTS, _CARDS = "node_infiniband_port_data", "node_network"
_FABRIC: Final = (
    ("net_tx", f"{_PORTS}_transmitted_bytes_total", f"{_CARDS}_transmit_bytes_total"),
    ("net_rx", f"{_PORTS}_received_bytes_total", f"{_CARDS}_receive_bytes_total"),
)


def has_hosts(names: frozenset[str]) -> bool:
    """Tell whether a server has anything of nodes."""
    return any(ask.metric in names for group in ASKS for ask in group)


def instance_names(
    server: Prometheus, fleet: Fleet, start_s: float, end_s: float
) -> dict[str, str]:
    """Ask what nodes call themselves, by the address at which they are scraped."""
    if "node_uname_info" not in fleet.names:
        return {}
    span = f"{round(max(end_s - start_s, 3600))}s"
    found = server.query(f"last_over_time({fleet.of('node_uname_info')}[{span}])", end_s)
    return {
        host_of(each.labels.get("instance", "")): each.labels["nodename"]
        for each in found
        if each.labels.get("nodename")
    }


def node_samples(cut: Slice) -> pa.Table:
    """Read the samples of nodes of a slice of time."""
    rows: dict[str, int] = {}
    columns: dict[str, Floats] = {}
    for group in ASKS:
        for ask in group:
            if ask.metric in cut.fleet.names:
                _add(columns, ask.column, _laid(cut, ask, rows))
    for column, port, card in _FABRIC:
        # Nodes with InfiniBand send little else through their other cards.
        if port in cut.fleet.names:
            columns[column] = _laid(cut, _Ask(column, port), rows)
        elif card in cut.fleet.names:
            columns[column] = _laid(cut, _Ask(column, card, _ETHERNET), rows)
    columns = {name: padded(values, len(rows)) for name, values in columns.items()}
    return _table(cut, list(rows), _derived(columns))


def _expression(fleet: Fleet, ask: _Ask, step_s: float) -> str:
    metric = fleet.of(ask.metric, ask.matcher)
    if ask.how == "value":
        return f"max by ({_BY}) (avg_over_time({metric}[{window(step_s)}]))"
    span = fleet.rate_window(step_s)
    some = f"sum by ({_BY}) (rate({metric}[{span}]))"
    # Over all modes and not over the clock: at a restart and a beginning both are cut alike.
    whole = f"sum by ({_BY}) (rate({fleet.of(ask.metric)}[{span}]))"
    return f"{some} / {whole}" if ask.how == "share" else some


def _laid(cut: Slice, ask: _Ask, rows: dict[str, int]) -> Floats:
    answer = cut.ask(_expression(cut.fleet, ask, cut.grid.step_s))
    named = [(_node(series.labels, cut.fleet), series) for series in answer]
    found = [(rows.setdefault(node, len(rows)), series) for node, series in named if node]
    return mean_of_rows(cut.grid, len(rows), found)


def _node(labels: dict[str, str], fleet: Fleet) -> str:
    """An address is a poor name: what the node calls itself at that address is a better one."""
    host = host_of(labels.get("instance", ""))
    own = fleet.naming.instances.get(host)
    if own and not fleet.naming.label:
        return node_of({"Hostname": own}, fleet.naming)
    return node_of(labels, fleet.naming)


def _add(columns: dict[str, Floats], name: str, values: Floats) -> None:
    before = columns.get(name)
    if before is None:
        columns[name] = values
        return
    before = padded(before, len(values))
    some = ~(np.isnan(before) & np.isnan(values))
    columns[name] = np.where(some, np.nan_to_num(before) + np.nan_to_num(values), np.nan)


def _derived(columns: dict[str, Floats]) -> dict[str, Floats]:
    available = columns.pop("available", None)
    if available is not None and "memory_total" in columns:
        columns["memory_used"] = columns["memory_total"] - available
    return columns


def _table(cut: Slice, nodes: list[str], columns: dict[str, Floats]) -> pa.Table:
    some = np.zeros((len(nodes), cut.grid.points), dtype=bool)
    # A rate is made of samples further back, and is no sign that there was one in this step.
    measured = [columns[name] for name in ("memory_used", "memory_total") if name in columns]
    for values in measured or columns.values():
        some |= ~np.isnan(values)
    at, row = np.nonzero(some.T)
    return rows_of(
        "node_samples",
        {
            "cluster": pa.repeat(pa.scalar(cut.fleet.cluster), len(row)),
            "node": pa.array(nodes, pa.string()).take(pa.array(row, pa.int64())),
            "time_s": cut.grid.times()[at],
            **{name: values[row, at] for name, values in columns.items()},
        },
    )
