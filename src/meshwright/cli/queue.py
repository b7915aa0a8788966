"""`mw queue VERB`: what another policy would make of a cluster's jobs."""

import argparse
from importlib import import_module
from typing import cast

from meshwright.cli.answer import Answer
from meshwright.cli.commands import Module
from meshwright.cli.parser import verbs

_SUMMARIES = {
    "simulate": "replay jobs through a queue: waits, use of the GPUs, fairness",
    "compare": "the same jobs through several policies, side by side",
    "pack": "fill a cluster with jobs: how much of it each placement gives away",
}

EXAMPLES = (
    "mw queue simulate jobs.csv --gpus 512 --per-node 8 --policy easy",
    "mw queue compare fleet/ --policies fifo,easy,sjf,srsf,las --estimate predicted",
    "mw queue pack openb_pod_list_default.csv --nodes openb_node_list_gpu_node.csv",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs and their flags."""
    found = verbs(
        parser, [(verb, text, _module(verb).EXAMPLES) for verb, text in _SUMMARIES.items()]
    )
    for verb, sub in found.items():
        _module(verb).configure(sub)


def run(args: argparse.Namespace) -> Answer:
    """Answer one of the verbs."""
    return _module(args.verb).run(args)


def _module(verb: str) -> Module:
    return cast(Module, import_module(f"meshwright.cli.queue_{verb}"))
