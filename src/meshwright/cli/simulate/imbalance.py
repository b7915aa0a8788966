"""Uneven passes on the command line: flags for slow ranks, jitter and busy experts, and their cost.

The schedule is executed event by event, even and as asked; what is random is also drawn for every
replica of the job, which waits for the slowest one.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.predict.event_sim.noise import NO_NOISE, StepNoise
from meshwright.predict.event_sim.replicas import simulate_replicas
from meshwright.predict.event_sim.step_simulation import SimulatedStep, simulate_step
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.units import format_seconds, parse_count, parse_number

MAX_REPLICAS = 20_000_000
"""Passes of all replicas that are drawn at the most: a few seconds."""
_FLAGS = {
    "slowdown": "--straggler",
    "jitter_cv": "--jitter",
    "slow_share": "--slow-gpus",
    "slow_factor": "--slow-gpus",
    "expert_load": "--expert-load",
}


class PassVariation(NamedTuple):
    """What makes passes uneven; nothing, where nothing was asked."""

    slowdown: dict[int, float]
    """How many times longer single pipeline ranks take."""
    noise: StepNoise
    seed: int


class SimulatedVariation(NamedTuple):
    """One step as the schedule takes it."""

    even_step: SimulatedStep
    uneven_step: SimulatedStep
    """The same as `even_step` where nothing was asked; else of one replica."""
    replicas_s: float | None
    """The step of a job whose replicas each have their own luck; None where it was not drawn."""

    @property
    def description(self) -> str:
        """How long it takes, and what unevenness adds."""
        if self.replicas_s is not None:
            slowest = f"with the slowest of {self.even_step.run.layout.dp:,} uneven replicas"
            return f"{format_seconds(self.replicas_s)}, {self._more(self.replicas_s)} {slowest}"
        text = f"event simulation {format_seconds(self.uneven_step.step_s)}"
        if self.uneven_step is not self.even_step:
            text += f", {self._more(self.uneven_step.step_s)} as it is uneven"
        return text

    def _more(self, step_s: float) -> str:
        return f"{step_s / self.even_step.step_s - 1:+.1%}"


def add_variation(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = parser.add_argument_group("event simulation of the schedule")
    group.add_argument(
        "--straggler", metavar="RANK=X", action="append", default=[],
        help="passes of a pipeline rank take X times as long; may be given several times",
    )  # fmt: skip
    group.add_argument(
        "--jitter", metavar="CV", help="random spread of every pass: its coefficient of variation"
    )
    group.add_argument(
        "--slow-gpus", metavar="SHARE=X",
        help="a share of all GPUs, wherever they are, takes X times as long",
    )  # fmt: skip
    group.add_argument(
        "--expert-load", metavar="X", help="tokens of the busiest expert rank over the mean"
    )
    group.add_argument("--seed", metavar="N", default="0", help="where random draws start")
    group.add_argument(
        "--timeline", metavar="FILE",
        help="write the step for the Perfetto UI: .json, .json.gz or .perfetto",
    )  # fmt: skip


def read_variation(args: argparse.Namespace) -> PassVariation:
    """Read the flags, or say everything that is wrong with them."""
    problems: list[Problem] = []
    slowdown: dict[int, float] = {}
    values: dict[str, float] = {}
    seed = 0
    for pair in ",".join(args.straggler).split(",") if args.straggler else ():
        with _noted(problems, "--straggler", pair, "a rank and a factor", "3=1.2"):
            rank, _, factor = pair.partition("=")
            slowdown[parse_count(rank)] = parse_number(factor)
    if args.slow_gpus is not None:
        with _noted(problems, "--slow-gpus", args.slow_gpus, "a share and a factor", "0.001=1.2"):
            share, _, factor = args.slow_gpus.partition("=")
            values |= {"slow_share": parse_number(share), "slow_factor": parse_number(factor)}
    if args.jitter is not None:
        with _noted(problems, "--jitter", args.jitter, "a number", "0.05"):
            values["jitter_cv"] = parse_number(args.jitter)
    if args.expert_load is not None:
        with _noted(problems, "--expert-load", args.expert_load, "a number", "1.3"):
            values["expert_load"] = parse_number(args.expert_load)
    with _noted(problems, "--seed", args.seed, "a whole number", "7"):
        seed = parse_count(args.seed)
    noise = NO_NOISE
    try:
        noise = StepNoise(**values)
    except InputError as error:
        problems += _flagged(error)
    if problems:
        raise InputError(problems)
    return PassVariation(slowdown, noise, seed)


@contextmanager
def _noted(
    problems: list[Problem], flag: str, text: str, allowed: str, example: str
) -> Iterator[None]:
    try:
        yield
    except InputError:
        what = f"{text!r} is not {allowed}"
        problems.append(Problem(flag, what, f"write it like {example}"))


def simulate_variation(run: TrainingRun, uneven: PassVariation) -> SimulatedVariation:
    """Execute the step, even and as asked."""
    slowdown, noise, seed = uneven
    if noise.expert_load > 1 and run.layout.ep == 1:
        what = "experts are not spread over ranks (ep is 1), so none gets more tokens"
        raise InputError([Problem("--expert-load", what, "leave it out, or set --ep")])
    even = simulate_step(run)
    if not slowdown and noise == NO_NOISE:
        return SimulatedVariation(even, even, None)
    try:
        one = simulate_step(run, slowdown=slowdown, noise=noise, seed=seed)
    except InputError as error:
        raise InputError(_flagged(error)) from None
    drawn = len(one.actions.rank) * run.layout.dp
    # A straggler sits in one replica; what the others draw beside it says nothing about it.
    if slowdown or not (noise.jitter_cv or noise.slow_share) or not 1 < drawn <= MAX_REPLICAS:
        return SimulatedVariation(even, one, None)
    return SimulatedVariation(even, one, simulate_replicas(run, noise, seed=seed).step_s)


def _flagged(error: InputError) -> list[Problem]:
    return [
        problem._replace(where=_FLAGS.get(problem.where.partition(".")[0], problem.where))
        for problem in error.problems
    ]
