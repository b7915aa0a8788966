"""Named inefficiencies of a fleet: what shows them, what they cost, whose they are, what to do.

`load_fleet_data` makes a `FleetData` of a store, `find_inefficiencies` looks for every pattern in
it, `write_owner_reports` writes to owners.
"""

from meshwright.fleet.patterns.data.fleet_data import FleetData, build_fleet_data
from meshwright.fleet.patterns.data.loader import load_fleet_data
from meshwright.fleet.patterns.detection import (
    PatternCase,
    find_cases,
    find_inefficiencies,
    finding_to_data,
    list_patterns,
)
from meshwright.fleet.patterns.finding import FleetFinding
from meshwright.fleet.patterns.fleet_pattern import FleetDetection, FleetPattern
from meshwright.fleet.patterns.owner_reports import write_owner_report, write_owner_reports

__all__ = [
    "FleetData",
    "FleetDetection",
    "FleetFinding",
    "FleetPattern",
    "PatternCase",
    "build_fleet_data",
    "find_cases",
    "find_inefficiencies",
    "finding_to_data",
    "list_patterns",
    "load_fleet_data",
    "write_owner_report",
    "write_owner_reports",
]
