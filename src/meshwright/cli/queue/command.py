"""`mw queue VERB`: what another policy would make of a cluster's jobs."""

import argparse
from collections.abc import Callable

from meshwright.cli.command_entry import CommandModule
from meshwright.cli.parser import add_verbs
from meshwright.cli.result import CommandResult


def _load_simulate() -> CommandModule:
    from meshwright.cli.queue import simulate

    return simulate


def _load_compare() -> CommandModule:
    from meshwright.cli.queue import compare

    return compare


def _load_pack() -> CommandModule:
    from meshwright.cli.queue import pack

    return pack


_VERBS: dict[str, tuple[str, Callable[[], CommandModule]]] = {
    "simulate": ("replay jobs through a queue: waits, use of the GPUs, fairness", _load_simulate),
    "compare": ("the same jobs through several policies, side by side", _load_compare),
    "pack": ("fill a cluster with jobs: how much of it each placement allocates", _load_pack),
}

EXAMPLES = (
    "mw queue simulate jobs.csv --gpus 512 --gpus-per-node 8 --policy easy",
    "mw queue compare fleet/ --policies fifo,easy,sjf,srsf,las --runtime-estimate predicted",
    "mw queue pack openb_pod_list_default.csv --nodes openb_node_list_gpu_node.csv",
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
