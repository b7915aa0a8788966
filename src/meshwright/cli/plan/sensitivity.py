"""Runs and renders `mw plan` sensitivity analyses of batch, length, GPUs and failure rate."""

import argparse
from collections.abc import Sequence
from typing import Any

from meshwright.cli.flags.long_run import read_reliability
from meshwright.cli.plan.flags import read_request
from meshwright.cli.plan.screen import plan_to_data
from meshwright.cli.plan.sweep import describe_search_space, format_question, show_defaults_used
from meshwright.cli.render.progress import show_search_progress
from meshwright.cli.render.step_screen import format_layout
from meshwright.cli.result import CommandResult, TableView, make_fields, make_table
from meshwright.predict.plan import find_plans
from meshwright.predict.plan.search.branch_and_bound import restrict_to_common_layouts
from meshwright.predict.plan.studies.sweeps import (
    SweepRate,
    analyze_sensitivity,
)
from meshwright.spec.units import format_count


def run_sensitivity(args: argparse.Namespace) -> CommandResult:
    """Answer with how the winner's figures hang on what was asked."""
    request, assumed = read_request(args), read_reliability(args)
    question = request.question if args.exact else restrict_to_common_layouts(request.question)
    with show_search_progress("searching", quiet=args.quiet or args.json) as (report, rename):
        answer = find_plans(question, most=1, report=report, execute=False)
        rename("varying what was asked")
        found = analyze_sensitivity(answer, exact=args.exact, reliability=assumed, report=report)
    heads = {
        "batch": ("batch", "sequences per step"),
        "length": ("length", "sequence length, tokens per step kept"),
        "gpus": ("GPUs", "GPUs, tokens per step kept"),
        "failures": ("per year", "failures per GPU and year, failures included in the figures"),
    }
    tables = [_rates(getattr(found, name), name, *heads[name]) for name in heads]
    head = {
        "work": format_question(request.question),
        "layout": format_layout(answer.best.layout),
        "layouts": describe_search_space(args),
        "costs": request.calibration.description,
    }
    data = {
        "plan": plan_to_data(answer.best),
        **{name: [_rate_data(rate) for rate in getattr(found, name)] for name in heads},
        "filled": request.defaults_used,
    }
    quiet = tuple(
        f"{name}={rate.value}\t{rate.tokens_per_s:.6g}"
        for name in heads
        for rate in getattr(found, name)
        if rate.tokens_per_s is not None
    )
    views = (make_fields(head), *tables, *show_defaults_used(request))
    return CommandResult("plan.sensitivity/2", data, views, quiet, 0 if quiet else 1)


def _rates(rates: Sequence[SweepRate], name: str, column: str, title: str) -> TableView:
    failures, remarks = name == "failures", any(rate.problems for rate in rates)
    rows = [
        (
            f"{rate.value * 24 * 365.25:.3g}" if failures else f"{rate.value:,}",
            "–" if rate.tokens_per_s is None else format_count(rate.tokens_per_s),
            "" if rate.mfu is None else f"{rate.mfu:.1%}",
            ""
            if rate.dollars_per_trillion_tokens is None
            else format_count(rate.dollars_per_trillion_tokens),
            *_goodput(rate, failures),
            *([rate.problems[0].what if rate.problems else ""] if remarks else []),
        )
        for rate in rates
    ]
    numbers = f"{column}, tok/s, MFU, $/T{', goodput, spares' * failures}"
    columns = f"{numbers}{', remark' * remarks}"
    return make_table(columns, rows, title, right=numbers, wide="remark")


def _goodput(rate: SweepRate, failures: bool) -> list[str]:
    if not failures:
        return []
    goodput = "" if rate.goodput is None else f"{rate.goodput:.1%}"
    return [goodput, "" if rate.spares is None else f"{rate.spares:,}"]


def _rate_data(rate: SweepRate) -> dict[str, Any]:
    values = {name: getattr(rate, name) for name in rate.__struct_fields__ if name != "problems"}
    return {**values, "problems": [problem._asdict() for problem in rate.problems]}
