"""The `mw fleet` subcommands: telemetry ingestion, GPU-hour reports, health, patterns and exporter.

Each subcommand has its own module; `report_screen` and `report_page` render the report.
"""
