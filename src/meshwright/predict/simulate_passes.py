"""How long every action of a plan takes, and what that time is spent on, noise included.

Nothing here knows when an action runs.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.errors import Problem
from meshwright.policy.pipeline.schedule import Schedule
from meshwright.predict.adapters import trained_parameters
from meshwright.predict.bubble import rank_times
from meshwright.predict.pass_time import LAST, PassTable, Pieces, pass_table, together
from meshwright.predict.run import Run
from meshwright.predict.simulate_experts import chunk_growth, expert_layers
from meshwright.predict.simulate_noise import (
    Floats,
    Noise,
    expert_loads,
    pass_factors,
    rank_factors,
    tied_replicas,
)
from meshwright.predict.simulate_plan import Plan, lasts_apart
from meshwright.predict.stage_time import chunk_times
from meshwright.predict.step import pass_waits
from meshwright.spec.layout import rank_parameters

Ints = npt.NDArray[np.int64]
PASSES = ("F", "B", "I", "W")
"""Forward, full backward, and the input and weight parts of a split one."""


class Listed(NamedTuple):
    """The actions of a schedule, rank by rank in the order they run."""

    rank: Ints
    """The pipeline rank."""
    op: Ints
    """Index into `PASSES`."""
    chunk: Ints
    microbatch: Ints
    joined: npt.NDArray[np.bool_]
    """Runs beside the action before it."""


def listed(schedule: Schedule) -> Listed:
    """Return a schedule's actions as columns."""
    every = [action for lane in schedule.actions for action in lane]
    return Listed(
        np.repeat(np.arange(schedule.ranks), [len(lane) for lane in schedule.actions]),
        np.array([PASSES.index(action.op) for action in every], dtype=np.int64),
        np.array([action.chunk for action in every], dtype=np.int64),
        np.array([action.microbatch for action in every], dtype=np.int64),
        np.array([action.joined for action in every], dtype=np.bool_),
    )


class PassCosts(NamedTuple):
    """Seconds of every action, a row each and a column for each of `Pieces`.

    Where two actions are joined, the first row holds what both take together.
    """

    usual_s: Floats
    growth_s: Floats
    """What an action adds where the busiest expert rank has twice the mean tokens."""


def table_of(run: Run) -> PassTable:
    """Return the pieces of every pass over every chunk of a run."""
    times = chunk_times(run)
    stages, parameters = rank_times(run, times), rank_parameters(run.layout, run.model)
    waits = pass_waits(run, times, stages, parameters, trained_parameters(run))
    return pass_table(times, waits)


def ends_differ(table: PassTable) -> bool:
    """Whether the backward that ends a chunk's step takes another time than those before it."""
    return any(op in LAST.values() for op, _ in table)


def pass_costs(run: Run, plan: Plan, actions: Listed) -> PassCosts:
    """Price every action of a plan without noise."""
    table = table_of(run)
    if ends_differ(table):
        plan = lasts_apart(plan)
    groups = np.array([together(run, table, passes) for passes in plan.groups])
    rows = np.array([row[1:3] for row in plan.rows], dtype=np.int64)
    usual = np.zeros((plan.actions, len(Pieces._fields)))
    usual[rows[:, 1]] = groups[rows[:, 0]]
    return PassCosts(usual, _growth(run, table, actions, usual))


def _growth(run: Run, table: PassTable, actions: Listed, usual: Floats) -> Floats:
    known = chunk_growth(run)
    each = np.zeros((len(PASSES), 1 + int(actions.chunk.max()), len(Pieces._fields)))
    for (op, chunk), pieces in table.items():
        if op not in PASSES:
            continue
        # The exchange stretches with the load, as far as it is exposed.
        each[PASSES.index(op), chunk] = Pieces(*known[op, chunk], ep=pieces.ep)
    growth: Floats = each[actions.op, actions.chunk]
    second = np.flatnonzero(actions.joined)
    apart = growth[second - 1, _EP] + growth[second, _EP]
    left = np.divide(usual[second - 1, _EP], apart, out=np.zeros(len(second)), where=apart > 0)
    growth[second - 1, _EP] *= left
    growth[second, _EP] *= left
    return growth


_EP = Pieces._fields.index("ep")


def noisy_pieces(
    run: Run,
    actions: Listed,
    costs: PassCosts,
    *,
    noise: Noise,
    slowdown: Mapping[int, float],
    seed: int,
) -> Floats:
    """Return the pieces of every action of one replica."""
    ranks = run.layout.pp
    draw = np.random.default_rng(seed)
    stretch, load = draw_replicas(run, actions, draw, noise, 1)
    pieces: Floats = costs.usual_s + costs.growth_s * (load - 1)
    second = np.flatnonzero(actions.joined)
    pieces[second - 1] += pieces[second]
    pieces[second] = 0.0
    fixed = np.array([slowdown.get(rank, 1.0) for rank in range(ranks)])
    pieces *= stretch * fixed[actions.rank, None]
    return pieces


def draw_replicas(
    run: Run, actions: Listed, draw: np.random.Generator, noise: Noise, replicas: int
) -> tuple[Floats, Floats]:
    """Draw for every action and replica how its time stretches, and the load of its experts."""
    count, layout = len(actions.rank), run.layout
    stretch = pass_factors(draw, noise, (count, replicas), tied_replicas(run))
    second = np.flatnonzero(actions.joined)
    stretch[second] = stretch[second - 1]  # both run side by side
    gpus = layout.tp * layout.cp * tied_replicas(run)
    stretch *= rank_factors(draw, noise, (layout.pp, replicas), gpus)[actions.rank]
    layers = expert_layers(run)
    shape = len(layers), int(actions.microbatch.max()) + 1, replicas
    load = expert_loads(draw, noise, shape, layers)[actions.chunk, actions.microbatch]
    return stretch, load


def slowdown_problems(slowdown: Mapping[int, float], ranks: int) -> list[Problem]:
    """Return what is wrong with the factors of single pipeline ranks."""
    problems = []
    for rank, factor in slowdown.items():
        if not 0 <= rank < ranks:
            fix = f"use 0 to {ranks - 1}"
            problems.append(Problem("slowdown", f"{rank!r} is not a pipeline rank", fix))
        if not 0 < factor < float("inf"):
            what = f"{factor!r} is not a factor"
            problems.append(Problem(f"slowdown.{rank}", what, "use 1.1 for a tenth slower"))
    return problems
