"""`mw collective VERB`: algorithms of collectives, listed, drawn, proved, simulated and run."""

import argparse
from importlib import import_module
from typing import cast

from meshwright.cli.answer import Answer
from meshwright.cli.commands import Module
from meshwright.cli.parser import verbs

EXAMPLES = (
    "mw collective list",
    "mw collective show ring --ranks 4 --svg ring.svg",
    "mw collective simulate --cluster h100-superpod --gpus 16 --size 64MiB",
    "mw collective explain --cluster h100-superpod --gpus 16",
)

_SUMMARIES = {
    "list": "the algorithms there are, with their steps and traffic",
    "show": "draw an algorithm: who sends which chunk to whom, and when",
    "verify": "prove that an algorithm is right, or show the shortest case where it is not",
    "simulate": "predict how long it takes on a cluster, and which link holds it up",
    "synthesize": "make a schedule for a topology, also one with broken links",
    "bench": "run it on this machine's processes or GPUs and measure",
    "export": "write it for MSCCL, MSCCL++ or as a file, or write a tuner file for NCCL",
    "explain": "what NCCL will pick on a cluster, and why",
}


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
    return cast(Module, import_module(f"meshwright.cli.collective_{verb}"))
