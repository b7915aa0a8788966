"""`mw fleet serve`: the report over HTTP, as a page, as JSON and as metrics for Prometheus."""

import argparse
import hmac
import json
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import NamedTuple

from meshwright.cli.fleet import report
from meshwright.cli.fleet.account_reader import read_account
from meshwright.cli.fleet.flags import count_outside, open_store, read_scope
from meshwright.cli.fleet.report_page import render_report_page
from meshwright.cli.fleet.report_screen import make_result
from meshwright.cli.render.safe_text import print_to_stderr
from meshwright.cli.result import CommandResult, NoteView
from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.fleet.account import to_gpu_hours
from meshwright.fleet.account.prices import parse_prices
from meshwright.fleet.account.report import FleetReport, build_report
from meshwright.fleet.store import TableSize
from meshwright.http_pages.allowed_hosts import (
    ALLOWED_HOSTS_HELP,
    is_loopback_name,
    parse_allowed_hosts,
)
from meshwright.http_pages.page_server import Page, PageRequest, PageServer
from meshwright.spec.units import parse_count, parse_seconds

EXAMPLES = (
    "mw fleet serve",
    "mw fleet serve --since 30d --redact --host 0.0.0.0 --token-file page.token",
)
_LEAST_TOKEN = 16


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags: those of the report, and where it is served."""
    report.configure(parser)
    serving = parser.add_argument_group("serving")
    serving.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    serving.add_argument("--port", default="8480", metavar="N", help="port (default: 8480)")
    serving.add_argument(
        "--refresh", default="5min", metavar="TIME",
        help="how old a report may be before it is made anew (default: 5min)",
    )  # fmt: skip
    serving.add_argument(
        "--token-file", metavar="FILE",
        help="answer only who sends `Authorization: Bearer` with what this file holds",
    )  # fmt: skip
    serving.add_argument("--allowed-hosts", metavar="NAMES", help=ALLOWED_HOSTS_HELP)


class RenderedReport(NamedTuple):
    """A report in all its forms."""

    rendered_s: float
    page: bytes
    data: bytes
    metrics: bytes


class ReportCache:
    """The newest report, made when somebody asks for it and the last one is too old."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._prices, self._top = parse_prices(args.price), parse_count(args.top, "--top")
        self._refresh_s = parse_seconds(args.refresh, "--refresh")
        self._lock = threading.Lock()
        self._made: RenderedReport | None = None

    def latest(self) -> RenderedReport:
        """Return a report that is young enough; one is made at a time."""
        with self._lock:
            if self._made is None or time.monotonic() - self._made.rendered_s > self._refresh_s:
                self._made = self._make()
            return self._made

    def _make(self) -> RenderedReport:
        with open_store(self._args) as store:
            sizes = store.table_sizes()
            scope = read_scope(store, self._args)
            found = read_account(store, self._args, scope)
            outside = count_outside(store, scope)
        report = build_report(found, self._prices, self._args.by, self._top)
        report = report._replace(outside=outside)
        told = make_result(report)
        data = {"schema": f"meshwright.{told.schema}", **told.data}
        lines = "\n".join(render_metrics(report, sizes)) + "\n"
        return RenderedReport(
            time.monotonic(),
            render_report_page(report).encode(),
            json.dumps(data).encode(),
            lines.encode(),
        )


def render_metrics(report: FleetReport, sizes: dict[str, TableSize]) -> Iterator[str]:
    """Yield the report as Prometheus reads it."""
    window = report.account.window
    yield "# HELP meshwright_fleet_gpu_hours GPU-hours of the time reported on, by where they went."
    yield "# TYPE meshwright_fleet_gpu_hours gauge"
    for bucket, amount in report.account.sum_buckets().items():
        yield f'meshwright_fleet_gpu_hours{{bucket="{bucket}"}} {to_gpu_hours(amount):.6g}'
    yield "# HELP meshwright_fleet_reported_seconds Length of the time reported on."
    yield "# TYPE meshwright_fleet_reported_seconds gauge"
    yield f"meshwright_fleet_reported_seconds {(window.until_ms - window.since_ms) / 1e3:.10g}"
    yield "# HELP meshwright_fleet_rows Rows of each table of the store."
    yield "# TYPE meshwright_fleet_rows gauge"
    there = {name: one for name, one in sizes.items() if one.num_rows}
    for name, one in there.items():
        yield f'meshwright_fleet_rows{{table="{name}"}} {one.num_rows}'
    yield "# HELP meshwright_fleet_known_until_seconds Last moment that a table tells of."
    yield "# TYPE meshwright_fleet_known_until_seconds gauge"
    for name, one in there.items():
        if one.last_s is not None:
            yield f'meshwright_fleet_known_until_seconds{{table="{name}"}} {one.last_s:.3f}'


_FORMS = {
    "/": ("text/html; charset=utf-8", "page"),
    "/report.json": ("application/json", "data"),
    "/metrics": ("text/plain; version=0.0.4; charset=utf-8", "metrics"),
}
"""Paths, with the type and the form of the report that is there."""


def make_server(args: argparse.Namespace) -> PageServer:
    """Return a server that answers once `serve_forever` is called."""
    reports, token = ReportCache(args), _token(args)
    port = parse_count(args.port, "--port")
    allowed_hosts = parse_allowed_hosts(args.allowed_hosts, args.host)

    def answer(request: PageRequest) -> Page:
        sent = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        if token and not hmac.compare_digest(sent.encode("utf-8", "replace"), token):
            return Page(b"a bearer token is needed\n", status=HTTPStatus.UNAUTHORIZED)
        if request.path not in _FORMS:
            told = f"there are {', '.join(_FORMS)}\n".encode()
            return Page(told, status=HTTPStatus.NOT_FOUND)
        try:
            made = reports.latest()
        except MeshwrightError as error:
            return Page(f"{error}\n".encode(), status=HTTPStatus.SERVICE_UNAVAILABLE)
        kind, form = _FORMS[request.path]
        return Page(getattr(made, form), kind)

    try:
        return PageServer((args.host, port), answer, allowed_hosts)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        what = f"{args.host}:{port} cannot be served at: {reason}"
        raise InputError([Problem("--port", what, "name another with --port")]) from None


def _token(args: argparse.Namespace) -> bytes:
    if not args.token_file:
        return b""
    try:
        found = Path(args.token_file).read_bytes().strip()
    except OSError as error:
        raise InputError([Problem(args.token_file, f"cannot read: {error.strerror}")]) from None
    if len(found) < _LEAST_TOKEN:
        what = f"holds a token of {len(found)} bytes"
        raise InputError([Problem(args.token_file, what, f"use {_LEAST_TOKEN} or more")])
    return found


def run(args: argparse.Namespace) -> CommandResult:
    """Serve until stopped."""
    with open_store(args):  # a store that is not there is told before anything is served
        pass
    with make_server(args) as serving:
        host, port = serving.server_address[:2]
        place = f"http://{host!s}:{port}"
        if not args.quiet:
            print_to_stderr(f"{place}/  {place}/report.json  {place}/metrics")
        if not args.token_file and not is_loopback_name(args.host):
            what = "served without a token to whoever can reach it; --token-file names one"
            print_to_stderr(what)
        serving.serve_forever()
    return CommandResult("fleet-serve/1", {"url": place}, (NoteView("stopped"),))
