"""A `Fleet` from the store: only the columns that detectors read, a part of the nodes at a time."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from meshwright.observe.fleet.account.redact import key_of, pseudonym, redacted
from meshwright.observe.fleet.patterns.fleet import Fleet, fleet_of
from meshwright.observe.fleet.patterns.hosts import FIGURES
from meshwright.observe.fleet.patterns.uses import BUSY_MEANS, MEANS, PEAKS

if TYPE_CHECKING:
    from meshwright.observe.fleet.store import Store

_ROLLED = {"samples": ("windows", "hours"), "node_samples": ("node_windows", "node_hours")}
ROWS_AT_ONCE = 2_500_000
"""Windows held in memory at a time: some 250 MB."""


def read(
    store: "Store", *, since_s: float, until_s: float, where: str | None = None,
    redact: bool = False,
) -> Fleet:  # fmt: skip
    """What a store knows of some time; `redact` puts pseudonyms for users and names of jobs."""
    held = store.held()
    tables = {
        name: store.table(name, None, since_s, until_s, where)
        for name in ("jobs", "held", "nodes", "events")
        if held[name].rows
    }
    if held["progress"].rows:
        # What a job lost is known from the checkpoints of its whole life.
        tables["progress"] = store.table("progress", None, None, until_s, where)
    if redact and "jobs" in tables:
        tables["jobs"] = _hidden(tables["jobs"], key_of(store.folder))
    # Windows of five minutes are let go after a while; those of an hour stay.
    rolled = {of: next((one for one in names if held[one].rows), None)
              for of, names in _ROLLED.items()}  # fmt: skip
    if (hosts := rolled["node_samples"]) is not None:
        columns = ["cluster", "node", "time_s", *(f"{name}_mean" for name in FIGURES)]
        tables["node_samples"] = store.table(hosts, columns, since_s, until_s, where)
    if (windows := rolled["samples"]) is None:
        return fleet_of(tables, since_s=since_s, until_s=until_s)
    nodes = _sampled(store, windows, where)
    parts = _parts(store, windows, nodes, since_s=since_s, until_s=until_s, where=where)
    return fleet_of(tables, since_s=since_s, until_s=until_s, samples=parts, nodes=nodes)


def _hidden(jobs: Any, key: bytes) -> Any:
    """Jobs with pseudonyms for users and for what they call their jobs."""
    import pyarrow as pa

    names = jobs["name"].dictionary_encode().unify_dictionaries().combine_chunks()
    if isinstance(names, pa.ChunkedArray):
        names = pa.concat_arrays(names.chunks)
    said = [pseudonym(one, key).replace("user-", "script-") for one in names.dictionary.to_pylist()]
    hidden = pa.array(said, pa.string()).take(names.indices)
    jobs = jobs.set_column(jobs.column_names.index("name"), "name", hidden)
    return redacted(jobs, key)


def _sampled(store: "Store", windows: str, where: str | None) -> Any:
    """The nodes that there are windows of."""
    clause = f" WHERE {where}" if where else ""
    return store.sql(f"SELECT DISTINCT cluster, node FROM {windows}{clause} ORDER BY 1, 2")


def _parts(
    store: "Store", windows: str, nodes: Any, *, since_s: float, until_s: float, where: str | None
) -> Iterator[Any]:
    """Windows of some nodes after others, so that all of a GPU come together."""
    means = dict.fromkeys(("gpu_util", "engine_active", *MEANS, *BUSY_MEANS, "memory_used"))
    columns = [
        "cluster", "node", "gpu", "time_s", "gpu_util_zero", "throttle_any",
        *(f"{name}_mean" for name in means if name != "activity"),
        *(f"{name}_max" for name in PEAKS if name != "activity"),
    ]  # fmt: skip
    names = nodes["node"].unique().to_pylist()
    total = store.held()[windows].rows
    turns = max(1, -(-total // ROWS_AT_ONCE))
    for turn in range(turns):
        own = ", ".join("'" + name.replace("'", "''") + "'" for name in names[turn::turns])
        if own:
            chosen = f"node IN ({own})" + (f" AND ({where})" if where else "")
            yield store.table(windows, columns, since_s, until_s, chosen)
