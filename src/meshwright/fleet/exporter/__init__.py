"""A light exporter for what other exporters leave out: GPUs without DCGM, steps and data waits."""

from meshwright.fleet.exporter.job_metrics import JobFolder
from meshwright.fleet.exporter.server import (
    ExporterCollector,
    ExporterServer,
    render_metrics,
    serve_metrics,
)

__all__ = ["ExporterCollector", "ExporterServer", "JobFolder", "render_metrics", "serve_metrics"]
