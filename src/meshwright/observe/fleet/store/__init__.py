"""Where a fleet's telemetry is kept: Parquet files by cluster and day, asked with DuckDB."""

from meshwright.observe.fleet.store.keeping import Kept, Limits
from meshwright.observe.fleet.store.layout import SCHEMAS, WINDOW_S
from meshwright.observe.fleet.store.store import Held, Put, Store

__all__ = ["SCHEMAS", "WINDOW_S", "Held", "Kept", "Limits", "Put", "Store"]
