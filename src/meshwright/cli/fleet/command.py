"""`mw fleet VERB`: where a cluster's GPU-hours go, from the telemetry it already has."""

import argparse
from collections.abc import Callable

from meshwright.cli.command_entry import CommandModule
from meshwright.cli.parser import add_verbs
from meshwright.cli.result import CommandResult


def _load_ingest() -> CommandModule:
    from meshwright.cli.fleet import ingest

    return ingest


def _load_report() -> CommandModule:
    from meshwright.cli.fleet import report

    return report


def _load_patterns() -> CommandModule:
    from meshwright.cli.fleet import patterns

    return patterns


def _load_health() -> CommandModule:
    from meshwright.cli.fleet import health

    return health


def _load_top() -> CommandModule:
    from meshwright.cli.fleet import top

    return top


def _load_serve() -> CommandModule:
    from meshwright.cli.fleet import serve

    return serve


def _load_exporter() -> CommandModule:
    from meshwright.cli.fleet import exporter

    return exporter


_VERBS: dict[str, tuple[str, Callable[[], CommandModule]]] = {
    "ingest": ("read telemetry into the store: Slurm, Prometheus, Kubernetes, files", _load_ingest),
    "report": ("where every GPU-hour went, and what would give some of them back", _load_report),
    "patterns": (
        "named inefficiencies with their evidence, cost, owner and remedy",
        _load_patterns,
    ),
    "health": ("nodes and GPUs that fail or are about to, and what to do with them", _load_health),
    "top": ("who holds which GPUs, in the mean of the last minutes and at their end", _load_top),
    "serve": ("the report as a page and as metrics, over HTTP", _load_serve),
    "exporter": ("GPUs and training jobs of this machine as a page for Prometheus", _load_exporter),
}

EXAMPLES = (
    "mw fleet ingest slurm: --since 7d",
    "mw fleet ingest http://prometheus:9090 --since 1d",
    "mw fleet ingest sacct.txt jobs.csv --store fleet/",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs and their flags."""
    parsers = add_verbs(
        parser, [(verb, text, load().EXAMPLES) for verb, (text, load) in _VERBS.items()]
    )
    for verb, sub in parsers.items():
        _module(verb).configure(sub)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer one of the verbs."""
    return _module(args.verb).run(args)


def _module(verb: str) -> CommandModule:
    _, load = _VERBS[verb]
    return load()
