"""`mw fleet report`: where every GPU-hour went, and what would give some of them back."""

import argparse

from meshwright.cli.answer import Answer
from meshwright.cli.files import write_text
from meshwright.cli.fleet_account import account_of, add_scope, asked, earlier
from meshwright.cli.fleet_figures import report_of
from meshwright.cli.fleet_page import page
from meshwright.cli.fleet_screen import answer
from meshwright.cli.fleet_store import add_store, open_store
from meshwright.cli.fleet_times import add_times
from meshwright.observe.fleet.account.goodput import KINDS
from meshwright.observe.fleet.account.prices import read_prices
from meshwright.spec.units import parse_count

EXAMPLES = (
    "mw fleet report",
    "mw fleet report --since 30d --by team --price 2.5",
    "mw fleet report --since 2026-11-09 --until 2026-11-16 --html week.html --redact",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    add_times(parser, "7d")
    parser.add_argument(
        "--by", choices=KINDS, default="user", help="whose goodput is told (default: user)"
    )
    parser.add_argument("--top", default="20", metavar="N", help="how many of these (default: 20)")
    parser.add_argument(
        "--price", metavar="DOLLARS",
        help="of a GPU-hour: 2.5, or h100=2.9,a100=1.4 (default: the catalog's)",
    )  # fmt: skip
    parser.add_argument(
        "--before", action="store_true", help="hold it against the same length of time before"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page that needs nothing else")
    add_scope(parser)
    add_store(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with the account."""
    prices, top = read_prices(args.price), parse_count(args.top, "--top")
    with open_store(args) as store:
        scope = asked(store, args)
        found = account_of(store, args, scope)
        before = account_of(store, args, earlier(scope)) if args.before else None
    report = report_of(found, prices, args.by, top)._replace(before=before)
    if args.html:
        write_text(args.html, page(report))
    return answer(report)
