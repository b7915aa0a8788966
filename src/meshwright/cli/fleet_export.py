"""`mw fleet export`: GPUs and training jobs of this machine as a page for Prometheus."""

import argparse
import sys
import threading

from meshwright.cli.answer import Answer, Text
from meshwright.errors import InputError, Problem
from meshwright.observe.fleet.exporter import Collector, Followed, page_text, serve_page
from meshwright.observe.fleet.exporter.page import PORT

EXAMPLES = (
    "mw fleet export",
    "mw fleet export --run runs/seventh=4711 --run watch-20251101/",
    "mw fleet export --host 0.0.0.0 --port 9421",
    "mw fleet export --once > /var/lib/node_exporter/mw.prom",
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
    parser.add_argument("--port", metavar="N", default=str(PORT), help=f"port ({PORT})")
    parser.add_argument("--once", action="store_true", help="print the page and end")


def run(args: argparse.Namespace) -> Answer:
    """Serve until a signal comes, or print once."""
    followed = [Followed.parse(each) for each in args.run]
    if not args.port.isdigit():
        raise InputError([Problem("--port", f"{args.port!r} is no port", f"give {PORT}, or 0")])
    collector = Collector(followed)
    if not collector.has_gpus and not followed:
        what = "this machine has no GPU of NVIDIA's, and no run is named"
        raise InputError([Problem("--run", what, "add --run FOLDER, or run this on a GPU host")])
    if args.once:
        text = page_text(collector)
        return Answer("fleet-export/1", {"page": text}, (Text(text.rstrip("\n")),), (text,))
    page = serve_page(collector, args.host, int(args.port))
    where = f"http://{args.host}:{page.port}/metrics"
    if not args.quiet:
        print(f"serving {where}, until Ctrl-C", file=sys.stderr)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        page.close()
    return Answer("fleet-export/1", {"url": where}, (), (where,))
