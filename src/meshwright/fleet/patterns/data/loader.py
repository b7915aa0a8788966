"""Load `FleetData` from the store: only the columns that detectors read, some nodes at a time."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright.fleet.account.redaction import load_redaction_key, make_pseudonym, redact_column
from meshwright.fleet.patterns.data.fleet_data import FleetData, build_fleet_data
from meshwright.fleet.patterns.data.host_usage import HOST_METRICS
from meshwright.fleet.patterns.data.utilization import BUSY_MEAN_METRICS, MAX_METRICS, MEAN_METRICS

if TYPE_CHECKING:
    from meshwright.fleet.store import FleetStore

_ROLLED = {
    "gpu_samples": ("gpu_rollups_5m", "gpu_rollups_1h"),
    "node_samples": ("node_rollups_5m", "node_rollups_1h"),
}
ROWS_PER_READ = 2_500_000
"""Windows held in memory at a time: some 250 MB."""


def load_fleet_data(
    store: "FleetStore", *, since_s: float, until_s: float, where: str | None = None,
    redact: bool = False,
) -> FleetData:  # fmt: skip
    """What a store knows of some time; `redact` puts pseudonyms for users and names of jobs."""
    sizes = store.table_sizes()
    tables = {
        name: store.read_table(name, None, since_s, until_s, where)
        for name in ("jobs", "allocations", "nodes", "events")
        if sizes[name].num_rows
    }
    if sizes["progress"].num_rows:
        # What a job lost is known from the checkpoints of its whole life.
        tables["progress"] = store.read_table("progress", None, None, until_s, where)
    if redact and "jobs" in tables:
        tables["jobs"] = _hidden(tables["jobs"], load_redaction_key(store.folder))
    # Windows of five minutes are let go after a while; those of an hour stay.
    rolled = {of: next((one for one in names if sizes[one].num_rows), None)
              for of, names in _ROLLED.items()}  # fmt: skip
    if (hosts := rolled["node_samples"]) is not None:
        columns = ["cluster", "node", "time_s", *(f"{name}_mean" for name in HOST_METRICS)]
        tables["node_samples"] = store.read_table(hosts, columns, since_s, until_s, where)
    if (windows := rolled["gpu_samples"]) is None:
        return build_fleet_data(tables, since_s=since_s, until_s=until_s)
    nodes = _sampled(store, windows, where)
    parts = _parts(store, windows, nodes, since_s=since_s, until_s=until_s, where=where)
    return build_fleet_data(tables, since_s=since_s, until_s=until_s, samples=parts, nodes=nodes)


def _hidden(jobs: Any, key: bytes) -> Any:
    """Jobs with pseudonyms for users and for what they call their jobs."""
    import pyarrow as pa

    names = jobs["name"].dictionary_encode().unify_dictionaries().combine_chunks()
    if isinstance(names, pa.ChunkedArray):
        names = pa.concat_arrays(names.chunks)
    said = [
        make_pseudonym(one, key).replace("user-", "script-") for one in names.dictionary.to_pylist()
    ]
    hidden = pa.array(said, pa.string()).take(names.indices)
    jobs = jobs.set_column(jobs.column_names.index("name"), "name", hidden)
    return redact_column(jobs, key)


def _sampled(store: "FleetStore", windows: str, where: str | None) -> Any:
    """The nodes that there are windows of."""
    clause = f" WHERE {where}" if where else ""
    return store.sql(f"SELECT DISTINCT cluster, node FROM {windows}{clause} ORDER BY 1, 2")


def _parts(
    store: "FleetStore",
    windows: str,
    nodes: Any,
    *,
    since_s: float,
    until_s: float,
    where: str | None,
) -> Iterator[Any]:
    """Windows of some nodes after others, so that all of a GPU come together."""
    means = dict.fromkeys(
        ("gpu_util", "engine_active", *MEAN_METRICS, *BUSY_MEAN_METRICS, "memory_used")
    )
    columns = [
        "cluster", "node", "gpu", "time_s", "gpu_util_zero", "throttle_any",
        *(f"{name}_mean" for name in means if name != "activity"),
        *(f"{name}_max" for name in MAX_METRICS if name != "activity"),
    ]  # fmt: skip
    names = nodes["node"].unique().to_pylist()
    total = store.table_sizes()[windows].num_rows
    turns = max(1, -(-total // ROWS_PER_READ))
    for turn in range(turns):
        own = ", ".join("'" + name.replace("'", "''") + "'" for name in names[turn::turns])
        if own:
            chosen = f"node IN ({own})" + (f" AND ({where})" if where else "")
            yield store.read_table(windows, columns, since_s, until_s, chosen)
