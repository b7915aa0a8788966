"""A light exporter for what other exporters leave out: GPUs without DCGM, steps and data waits."""

from meshwright.observe.fleet.exporter.page import Collector, Page, page_text, serve_page
from meshwright.observe.fleet.exporter.runs import Followed

__all__ = ["Collector", "Followed", "Page", "page_text", "serve_page"]
