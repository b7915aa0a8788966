"""How much longer a pass gets when one expert rank has more tokens than the others.

Products of experts cost more with more tokens, but not in proportion: with few tokens, reading the
weights sets their time. So the growth is taken from the cost model itself, as the difference that
one more expert per token makes.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from meshwright.errors import Problem
from meshwright.policy.pipeline.schedule import PipelineSchedule
from meshwright.predict.event_sim.noise import (
    Floats,
    StepNoise,
    count_synchronous_replicas,
    sample_expert_loads,
    sample_pass_factors,
    sample_rank_factors,
)
from meshwright.predict.step.block_time import PassTimes, block_passes
from meshwright.predict.step.pass_time import (
    LAST_BACKWARD,
    PassBreakdown,
    PassTable,
    build_pass_table,
    get_group_breakdown,
)
from meshwright.predict.step.pipeline_bubble import sum_rank_times
from meshwright.predict.step.schedule_graph import ScheduleGraph, split_last_backward
from meshwright.predict.step.stage_time import chunk_times
from meshwright.predict.step.step_prediction import predict_pass_waits
from meshwright.predict.training_run.lora_shapes import count_trained_parameters
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import ModelChunk, count_rank_parameters, list_chunks
from meshwright.spec.model import BlockSpec, MoESpec


class ImbalanceGrowth(NamedTuple):
    """Seconds that a pass grows by where the busiest rank has twice the mean tokens."""

    recompute_s: float = 0.0
    compute_s: float = 0.0


def imbalance_passes(run: TrainingRun, block: BlockSpec) -> PassTimes:
    """Return how much longer a block's compute gets by as many tokens again."""
    experts = block.mlp
    if not isinstance(experts, MoESpec) or run.layout.ep == 1 or experts.count == 1:
        return (
            PassTimes()
        )  # a rank that holds every expert has the same tokens whatever they choose
    more = 1 if experts.top_k < experts.count else -1
    other = msgspec.structs.replace(experts, top_k=experts.top_k + more)
    grown = block_passes(run, msgspec.structs.replace(block, mlp=other))
    usual = block_passes(run, block)
    share = experts.top_k * more
    return PassTimes(
        share * (grown.forward_s - usual.forward_s),
        share * (grown.dgrad_s - usual.dgrad_s),
        share * (grown.wgrad_s - usual.wgrad_s),
    )


def list_chunk_growth(run: TrainingRun) -> dict[tuple[str, int], ImbalanceGrowth]:
    """Return the growth of every pass over every chunk."""
    each = {block.name: imbalance_passes(run, block) for block in run.model.blocks}
    found: dict[tuple[str, int], ImbalanceGrowth] = {}
    for chunk in list_chunks(run.layout, run.model.layers):
        total = sum((each[name] for name in _names(run, chunk)), PassTimes())
        again = 0.0
        if run.layout.recompute == "full":
            covered = run.layout.recompute_layers
            layers = max(1, chunk.last - chunk.first)
            again = total.forward_s * (1 if covered is None else min(1.0, covered / layers))
        at = chunk.position
        found["F", at] = ImbalanceGrowth(0.0, total.forward_s)
        found["B", at] = ImbalanceGrowth(again, total.backward_s)
        found["I", at] = ImbalanceGrowth(again, total.dgrad_s)
        found["W", at] = ImbalanceGrowth(0.0, total.wgrad_s)
    return found


def count_expert_layers(run: TrainingRun) -> npt.NDArray[np.float64]:
    """Return how many layers of every chunk have experts."""
    has = {block.name: isinstance(block.mlp, MoESpec) for block in run.model.blocks}
    held = {one.position: one for one in list_chunks(run.layout, run.model.layers)}
    counts = [sum(has[name] for name in _names(run, held[at])) for at in range(len(held))]
    return np.array(counts, dtype=np.float64)


def _names(run: TrainingRun, chunk: ModelChunk) -> tuple[str, ...]:
    names = run.model.layer_names[chunk.first : chunk.last]
    heads = run.model.multi_token
    return names if heads is None or not chunk.has_head else (*names, *[heads.block] * heads.depth)


Ints = npt.NDArray[np.int64]

PASSES = ("F", "B", "I", "W")
"""Forward, full backward, and the input and weight parts of a split one."""


class ActionColumns(NamedTuple):
    """The actions of a schedule, rank by rank in the order they run."""

    rank: Ints
    """The pipeline rank."""
    op: Ints
    """Index into `PASSES`."""
    chunk: Ints
    microbatch: Ints
    is_concurrent: npt.NDArray[np.bool_]
    """Runs beside the action before it."""


def list_actions(schedule: PipelineSchedule) -> ActionColumns:
    """Return a schedule's actions as columns."""
    every = [action for lane in schedule.actions for action in lane]
    return ActionColumns(
        np.repeat(np.arange(schedule.ranks), [len(lane) for lane in schedule.actions]),
        np.array([PASSES.index(action.op) for action in every], dtype=np.int64),
        np.array([action.chunk for action in every], dtype=np.int64),
        np.array([action.microbatch for action in every], dtype=np.int64),
        np.array([action.is_concurrent for action in every], dtype=np.bool_),
    )


class ActionCosts(NamedTuple):
    """Seconds of every action, a row each and a column for each of `PassBreakdown`.

    Where two actions are joined, the first row holds what both take together.
    """

    noiseless_s: Floats
    imbalance_growth_s: Floats
    """What an action adds where the busiest expert rank has twice the mean tokens."""


def build_run_pass_table(run: TrainingRun) -> PassTable:
    """Return the pieces of every pass over every chunk of a run."""
    times = chunk_times(run)
    stages, parameters = sum_rank_times(run, times), count_rank_parameters(run.layout, run.model)
    waits = predict_pass_waits(run, times, stages, parameters, count_trained_parameters(run))
    return build_pass_table(times, waits)


def has_distinct_last_backward(table: PassTable) -> bool:
    """Whether the backward that ends a chunk's step takes another time than those before it."""
    return any(op in LAST_BACKWARD.values() for op, _ in table)


def compute_action_costs(
    run: TrainingRun, plan: ScheduleGraph, actions: ActionColumns
) -> ActionCosts:
    """Price every action of a plan without noise."""
    table = build_run_pass_table(run)
    if has_distinct_last_backward(table):
        plan = split_last_backward(plan)
    groups = np.array([get_group_breakdown(run, table, passes) for passes in plan.groups])
    rows = np.array([row[1:3] for row in plan.rows], dtype=np.int64)
    usual = np.zeros((plan.num_actions, len(PassBreakdown._fields)))
    usual[rows[:, 1]] = groups[rows[:, 0]]
    return ActionCosts(usual, _growth(run, table, actions, usual))


def _growth(run: TrainingRun, table: PassTable, actions: ActionColumns, usual: Floats) -> Floats:
    known = list_chunk_growth(run)
    each = np.zeros((len(PASSES), 1 + int(actions.chunk.max()), len(PassBreakdown._fields)))
    for (op, chunk), pieces in table.items():
        if op not in PASSES:
            continue
        # The exchange stretches with the load, as far as it is exposed.
        each[PASSES.index(op), chunk] = PassBreakdown(*known[op, chunk], ep=pieces.ep)
    growth: Floats = each[actions.op, actions.chunk]
    second = np.flatnonzero(actions.is_concurrent)
    apart = growth[second - 1, _EP] + growth[second, _EP]
    left = np.divide(usual[second - 1, _EP], apart, out=np.zeros(len(second)), where=apart > 0)
    growth[second - 1, _EP] *= left
    growth[second, _EP] *= left
    return growth


_EP = PassBreakdown._fields.index("ep")


def apply_noise(
    run: TrainingRun,
    actions: ActionColumns,
    costs: ActionCosts,
    *,
    noise: StepNoise,
    slowdown: Mapping[int, float],
    seed: int,
) -> Floats:
    """Return the pieces of every action of one replica."""
    ranks = run.layout.pp
    draw = np.random.default_rng(seed)
    stretch, load = sample_replicas(run, actions, draw, noise, 1)
    pieces: Floats = costs.noiseless_s + costs.imbalance_growth_s * (load - 1)
    second = np.flatnonzero(actions.is_concurrent)
    pieces[second - 1] += pieces[second]
    pieces[second] = 0.0
    fixed = np.array([slowdown.get(rank, 1.0) for rank in range(ranks)])
    pieces *= stretch * fixed[actions.rank, None]
    return pieces


def sample_replicas(
    run: TrainingRun,
    actions: ActionColumns,
    draw: np.random.Generator,
    noise: StepNoise,
    replicas: int,
) -> tuple[Floats, Floats]:
    """Draw for every action and replica how its time stretches, and the load of its experts."""
    count, layout = len(actions.rank), run.layout
    stretch = sample_pass_factors(draw, noise, (count, replicas), count_synchronous_replicas(run))
    second = np.flatnonzero(actions.is_concurrent)
    stretch[second] = stretch[second - 1]  # both run side by side
    gpus = layout.tp * layout.cp * count_synchronous_replicas(run)
    stretch *= sample_rank_factors(draw, noise, (layout.pp, replicas), gpus)[actions.rank]
    layers = count_expert_layers(run)
    shape = len(layers), int(actions.microbatch.max()) + 1, replicas
    load = sample_expert_loads(draw, noise, shape, layers)[actions.chunk, actions.microbatch]
    return stretch, load


def check_slowdown(slowdown: Mapping[int, float], ranks: int) -> list[Problem]:
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
