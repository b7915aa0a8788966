"""`mw fleet exporter`: GPUs and training jobs of this machine as a page for Prometheus."""

import argparse
import threading

from meshwright.cli.render.safe_text import print_to_stderr
from meshwright.cli.result import CommandResult, TextView
from meshwright.errors import InputError, Problem
from meshwright.fleet.exporter import ExporterCollector, JobFolder, render_metrics, serve_metrics
from meshwright.fleet.exporter.server import DEFAULT_PORT
from meshwright.http_pages.allowed_hosts import ALLOWED_HOSTS_HELP, parse_allowed_hosts

EXAMPLES = (
    "mw fleet exporter",
    "mw fleet exporter --run runs/seventh=4711 --run watch-20251101/",
    "mw fleet exporter --host 0.0.0.0 --port 9421",
    "mw fleet exporter --once > /var/lib/node_exporter/mw.prom",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "--run", action="append", default=[], metavar="FOLDER[=JOB]",
        help="a run of mw train or a folder of mw watch to tell of, and its job's number",
    )  # fmt: skip
    parser.add_argument(
        "--host", metavar="ADDRESS", default="127.0.0.1",
        help="where to listen (127.0.0.1: this machine only)",
    )  # fmt: skip
    parser.add_argument(
        "--port", metavar="N", default=str(DEFAULT_PORT), help=f"port ({DEFAULT_PORT})"
    )
    parser.add_argument("--allowed-hosts", metavar="NAMES", help=ALLOWED_HOSTS_HELP)
    parser.add_argument("--once", action="store_true", help="print the page and end")


def run(args: argparse.Namespace) -> CommandResult:
    """Serve until a signal comes, or print once."""
    followed = [JobFolder.parse(each) for each in args.run]
    if not args.port.isdigit():
        raise InputError(
            [Problem("--port", f"{args.port!r} is no port", f"give {DEFAULT_PORT}, or 0")]
        )
    collector = ExporterCollector(followed)
    if not collector.has_gpus and not followed:
        what = "this machine has no GPU of NVIDIA's, and no run is named"
        raise InputError([Problem("--run", what, "add --run FOLDER, or run this on a GPU host")])
    if args.once:
        text = render_metrics(collector)
        return CommandResult(
            "fleet-exporter/1",
            {"page": text},
            (TextView(text.rstrip("\n"), verbatim=True),),
            (text,),
        )
    hosts = parse_allowed_hosts(args.allowed_hosts, args.host)
    page = serve_metrics(collector, args.host, int(args.port), hosts)
    where = f"http://{args.host}:{page.port}/metrics"
    if not args.quiet:
        print_to_stderr(f"serving {where}, until Ctrl-C")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        page.close()
    return CommandResult("fleet-exporter/1", {"url": where}, (), (where,))
