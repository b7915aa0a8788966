"""Where a fleet's telemetry is kept: Parquet files by cluster and day, asked with DuckDB."""

from meshwright.fleet.store.manifest import is_store
from meshwright.fleet.store.retention import RetentionPolicy, RetentionResult
from meshwright.fleet.store.schema import SCHEMAS, WINDOW_S
from meshwright.fleet.store.store import FleetStore, PutResult, TableSize

__all__ = [
    "SCHEMAS",
    "WINDOW_S",
    "FleetStore",
    "PutResult",
    "RetentionPolicy",
    "RetentionResult",
    "TableSize",
    "is_store",
]
