"""The commands there are. Help needs only this table; a command's module loads when it is chosen.

Every command module has the same shape: `EXAMPLES` (lines that run as typed),
`configure(parser)` which adds its flags, and `run(args)` which returns an `Answer`.
"""

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple, Protocol, cast

from meshwright.cli.answer import Answer


class Command(NamedTuple):
    """One word after `mw`, or two."""

    summary: str
    group: str
    starts_job: bool = False
    """Whether what follows `--` is the command line of a job, and none of our own words."""


COMMANDS: dict[str, Command] = {
    "models": Command("models of the catalog, or one in full", "Look up"),
    "gpus": Command("GPUs of the catalog, or one in full", "Look up"),
    "clusters": Command("clusters of the catalog, or one in full", "Look up"),
    "layout": Command("check, size, export or import a parallel layout", "Describe"),
    "plan": Command("find the fastest layout there is, and say why it wins", "Predict"),
    "plan serve": Command("find the cheapest way to serve requests in time", "Predict"),
    "plan rl": Command("split GPUs between generating and training", "Predict"),
    "simulate": Command("predict one training step and where its time goes", "Predict"),
    "simulate serve": Command("predict how requests to a served model fare", "Predict"),
    "simulate rl": Command("predict steps of reinforcement learning", "Predict"),
    "whatif": Command("change one thing and see what the step makes of it", "Predict"),
    "validate": Command("score predictions against published measurements", "Predict"),
    "queue": Command("what another scheduling policy would make of a cluster's jobs", "Predict"),
    "collective": Command("collective algorithms: prove, draw, simulate, run, export", "Predict"),
    "train": Command("train a model as one TOML file says, or go on training", "Run"),
    "verify": Command("hold layouts against one device: first operation off, or a dry run", "Run"),
    "bench": Command("measure what this machine really does, and whether it is sound", "Run"),
    "calibrate": Command("fit the cost models to what mw bench measured on a device", "Run"),
    "twin": Command("hold steps of this machine against their prediction", "Run"),
    "launch": Command("write a training job for Slurm, Kubernetes or Ray; submit it", "Run"),
    "data": Command("tokenise text, look into tokens, train a tokenizer", "Run"),
    "serve": Command("answer over HTTP as OpenAI's API does, many requests at a time", "Run"),
    "chat": Command("talk to a model in the terminal", "Run"),
    "generate": Command("continue prompts offline, or measure how fast that goes", "Run"),
    "evaluate": Command("how often a model answers right, or a reward model prefers", "Run"),
    "export": Command("a training run's weights as a Hugging Face folder", "Run"),
    "watch": Command("run a job and watch it: captures, slowdowns, hangs", "Observe", True),
    "analyze": Command("where a profile's time goes, what is wrong, what to do", "Observe"),
    "diff": Command("two profiles, or a prediction and one: what changed, by cost", "Observe"),
    "roofline": Command("kernels of a profile against what the device can do", "Observe"),
    "timeline": Command("look into a recorded timeline, or open it in Perfetto", "Observe"),
    "hang": Command("which ranks hung a job, from flight-recorder dumps", "Observe"),
    "memory": Command("where GPU memory went, from a CUDA memory snapshot", "Observe"),
    "fleet": Command("where a cluster's GPU-hours go, and what gives them back", "Observe"),
    "doctor": Command("what this machine has, for bug reports", "Help"),
    "completion": Command("shell completion for bash, zsh or fish", "Help"),
}


class Module(Protocol):
    """What a command module offers."""

    EXAMPLES: tuple[str, ...]
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Answer]


def module(name: str) -> Module:
    """Import the module of a command."""
    return cast(Module, import_module(f"meshwright.cli.{name.replace(' ', '_')}"))


def joined(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, a command of two words as one of them."""
    found = list(words)
    at = next((place for place, word in enumerate(found) if not word.startswith("-")), 0)
    pair = " ".join(found[at : at + 2])
    if pair in COMMANDS:
        found[at : at + 2] = [pair]
    return found
