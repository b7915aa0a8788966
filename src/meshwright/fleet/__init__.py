"""Analysis of a cluster: where its GPU-hours go, what wastes them, and what would save them.

    ingest               telemetry of Slurm, Kubernetes, Prometheus or public traces into a store
    FleetStore           tables of a cluster as Parquet files, queried with DuckDB
    build_account        every GPU-hour of a time window in exactly one bucket
    find_inefficiencies  named patterns across jobs, with their owners and costs
    assess_fleet         health of nodes and GPUs, with drain advice

The names load on first use.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.fleet.account.account import GpuHourAccount, build_account
    from meshwright.fleet.health.assessment import FleetHealth, assess_fleet
    from meshwright.fleet.ingestion import IngestResult, ingest
    from meshwright.fleet.patterns.detection import find_inefficiencies
    from meshwright.fleet.patterns.finding import FleetFinding
    from meshwright.fleet.store.store import FleetStore

_MODULES = {
    "FleetFinding": "meshwright.fleet.patterns.finding",
    "FleetHealth": "meshwright.fleet.health.assessment",
    "FleetStore": "meshwright.fleet.store.store",
    "GpuHourAccount": "meshwright.fleet.account.account",
    "IngestResult": "meshwright.fleet.ingestion",
    "assess_fleet": "meshwright.fleet.health.assessment",
    "build_account": "meshwright.fleet.account.account",
    "find_inefficiencies": "meshwright.fleet.patterns.detection",
    "ingest": "meshwright.fleet.ingestion",
}

__all__ = [
    "FleetFinding",
    "FleetHealth",
    "FleetStore",
    "GpuHourAccount",
    "IngestResult",
    "assess_fleet",
    "build_account",
    "find_inefficiencies",
    "ingest",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
