"""`mw collective VERB`: algorithms of collectives, listed, drawn, proved, simulated and run."""

import argparse
from collections.abc import Callable

from meshwright.cli.command_entry import CommandModule
from meshwright.cli.parser import add_verbs
from meshwright.cli.result import CommandResult

EXAMPLES = (
    "mw collective list",
    "mw collective show ring --ranks 4 --svg ring.svg",
    "mw collective simulate --cluster h100-superpod --gpus 16 --size 64MiB",
    "mw collective explain --cluster h100-superpod --gpus 16",
)


def _load_list() -> CommandModule:
    from meshwright.cli.collective import list as list_command

    return list_command


def _load_show() -> CommandModule:
    from meshwright.cli.collective import show

    return show


def _load_verify() -> CommandModule:
    from meshwright.cli.collective import verify

    return verify


def _load_simulate() -> CommandModule:
    from meshwright.cli.collective import simulate

    return simulate


def _load_synthesize() -> CommandModule:
    from meshwright.cli.collective import synthesize

    return synthesize


def _load_bench() -> CommandModule:
    from meshwright.cli.collective import bench

    return bench


def _load_export() -> CommandModule:
    from meshwright.cli.collective import export

    return export


def _load_explain() -> CommandModule:
    from meshwright.cli.collective import explain

    return explain


_VERBS: dict[str, tuple[str, Callable[[], CommandModule]]] = {
    "list": ("the algorithms there are, with their steps and traffic", _load_list),
    "show": ("draw an algorithm: who sends which chunk to whom, and when", _load_show),
    "verify": (
        "prove that an algorithm is right, or show the shortest case where it is not",
        _load_verify,
    ),
    "simulate": (
        "predict how long it takes on a cluster, and which link holds it up",
        _load_simulate,
    ),
    "synthesize": ("make a schedule for a topology, also one with broken links", _load_synthesize),
    "bench": ("run it on this machine's processes or GPUs and measure", _load_bench),
    "export": (
        "write it for MSCCL, MSCCL++ or as a file, or write a tuner file for NCCL",
        _load_export,
    ),
    "explain": ("what NCCL will pick on a cluster, and why", _load_explain),
}


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
