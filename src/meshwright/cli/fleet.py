"""`mw fleet VERB`: where a cluster's GPU-hours go, from the telemetry it already has."""

import argparse
from importlib import import_module
from importlib.util import find_spec
from typing import cast

from meshwright.cli.answer import Answer
from meshwright.cli.commands import Module
from meshwright.cli.parser import verbs

_SUMMARIES = {
    "ingest": "read telemetry into the store: Slurm, Prometheus, Kubernetes, files",
    "report": "where every GPU-hour went, and what would give some of them back",
    "patterns": "named inefficiencies with their evidence, cost, owner and remedy",
    "health": "nodes and GPUs that fail or are about to, and what to do with them",
    "top": "who holds which GPUs now, and how busy they are",
    "serve": "the report as a page and as metrics, over HTTP",
    "export": "GPUs and training jobs of this machine as a page for Prometheus",
}

EXAMPLES = (
    "mw fleet ingest slurm: --since 7d",
    "mw fleet ingest http://prometheus:9090 --since 1d",
    "mw fleet ingest sacct.txt jobs.csv --store fleet/",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs and their flags."""
    there = {verb: text for verb, text in _SUMMARIES.items() if _is_there(verb)}
    found = verbs(parser, [(verb, text, _module(verb).EXAMPLES) for verb, text in there.items()])
    for verb, sub in found.items():
        _module(verb).configure(sub)


def run(args: argparse.Namespace) -> Answer:
    """Answer one of the verbs."""
    return _module(args.verb).run(args)


def _is_there(verb: str) -> bool:
    return find_spec(f"meshwright.cli.fleet_{verb}") is not None


def _module(verb: str) -> Module:
    return cast(Module, import_module(f"meshwright.cli.fleet_{verb}"))
