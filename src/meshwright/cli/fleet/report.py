"""`mw fleet report`: where every GPU-hour went, and what would give some of them back."""

import argparse

from meshwright.cli.flags.time_range import add_times
from meshwright.cli.fleet.account_reader import read_account
from meshwright.cli.fleet.flags import (
    add_scope,
    add_store,
    count_outside,
    open_store,
    read_scope,
    shift_scope_back,
)
from meshwright.cli.fleet.report_page import render_report_page
from meshwright.cli.fleet.report_screen import make_result
from meshwright.cli.render.files import write_text
from meshwright.cli.result import CommandResult
from meshwright.fleet.account.goodput import GROUP_KEYS
from meshwright.fleet.account.prices import parse_prices
from meshwright.fleet.account.report import build_report
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
        "--by", choices=GROUP_KEYS, default="user", help="whose goodput is told (default: user)"
    )
    parser.add_argument("--top", default="20", metavar="N", help="how many of these (default: 20)")
    parser.add_argument(
        "--price", metavar="DOLLARS",
        help="of a GPU-hour: 2.5, or h100=2.9,a100=1.4 (default: the catalog's)",
    )  # fmt: skip
    parser.add_argument(
        "--before", action="store_true", help="compare it with the same length of time before"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page that needs nothing else")
    add_scope(parser)
    add_store(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the account."""
    prices, top = parse_prices(args.price), parse_count(args.top, "--top")
    with open_store(args) as store:
        scope = read_scope(store, args)
        found = read_account(store, args, scope)
        before = read_account(store, args, shift_scope_back(scope)) if args.before else None
        outside = count_outside(store, scope)
    report = build_report(found, prices, args.by, top)
    report = report._replace(previous=before, outside=outside)
    if args.html:
        write_text(args.html, render_report_page(report))
    return make_result(report)
