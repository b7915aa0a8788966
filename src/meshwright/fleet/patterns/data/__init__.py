"""Column data that fleet pattern detectors read: jobs, allocations, utilization and faults.

`loader` builds `FleetData` from the telemetry store; the other modules hold its columns.
"""
