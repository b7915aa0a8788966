"""Every replica of a job with its own luck: the step ends when the slowest one has.

Replicas run the same schedule with their own jitter, slow GPUs and loads of experts, and meet when
gradients are reduced. All of them are simulated, many at a time; those that exchange tokens between
experts run in step and count as one. So the slowest of many is drawn, not estimated.
"""

from functools import cached_property
from itertools import chain

import msgspec
import numpy as np

from meshwright.policy.pipeline import build_layout_schedule
from meshwright.predict.event_sim.action_costs import (
    ActionColumns,
    ActionCosts,
    compute_action_costs,
    list_actions,
    sample_replicas,
)
from meshwright.predict.event_sim.dp_comm import (
    list_rank_chunks,
    simulate_grad_reductions,
    simulate_param_gathers,
)
from meshwright.predict.event_sim.noise import Floats, StepNoise, count_synchronous_replicas
from meshwright.predict.step.grad_buckets import predict_dp_comm
from meshwright.predict.step.optimizer_step import update_phases
from meshwright.predict.step.pipeline_bubble import (
    mean_transfer_s,
    skips_optimizer_barrier,
    sum_rank_times,
)
from meshwright.predict.step.schedule_graph import build_schedule_graph, run_schedule
from meshwright.predict.step.stage_time import chunk_times
from meshwright.predict.training_run.lora_shapes import count_trained_parameters
from meshwright.predict.training_run.training_run import TrainingRun

_AT_ONCE = 2_000_000
"""Passes of all replicas that are run at a time: about a hundred megabytes."""


class SimulatedReplicas(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """How long the replicas of one job take for a step."""

    passes_s: Floats
    """When each replica, or each set that runs in step, has done its passes."""
    step_s: float
    """Seconds of the step, which waits for the slowest."""

    @cached_property
    def mean_wait_s(self) -> float:
        """Seconds that a replica waits for the slowest one, on average."""
        return float(self.passes_s.max() - self.passes_s.mean())


def simulate_replicas(run: TrainingRun, noise: StepNoise, *, seed: int = 0) -> SimulatedReplicas:
    """Execute one training step of every replica in virtual time.

    The same seed gives the same step; other seeds show how much steps differ.
    """
    schedule = build_layout_schedule(run.layout, run.num_microbatches)
    plan, order = build_schedule_graph(schedule), list_actions(schedule)
    costs = compute_action_costs(run, plan, order)
    held = count_trained_parameters(run)
    exchanges, parts = [predict_dp_comm(run, one) for one in held], list_rank_chunks(run, order)
    _, floors = simulate_param_gathers(run, parts, exchanges, costs.noiseless_s.sum(axis=1))
    draw = np.random.default_rng(seed)
    sets = max(1, run.layout.dp // count_synchronous_replicas(run))
    passes = []
    # A reduction starts when the last replica has its gradients.
    begins, starts, ends = (np.full(plan.num_actions, first) for first in (np.inf, 0.0, 0.0))
    for count in _batches(sets, max(1, _AT_ONCE // plan.num_actions)):
        clocked = run_schedule(
            plan,
            list(_lengths_s(order, costs, sample_replicas(run, order, draw, noise, count))),
            mean_transfer_s(run),
            blocking=not run.layout.overlap_pp,
            not_before_s=floors,
            zero=np.zeros(count),
            later=np.maximum,
        )
        for part in chain.from_iterable(parts):
            first, last = part.first_forward, part.last_backward
            begins[first] = min(begins[first], clocked.start_s[first].min())
            starts[last] = max(starts[last], clocked.start_s[last].max())
            ends[last] = max(ends[last], clocked.end_s[last].max())
        lasts = [clocked.end_s[part.last_backward] for part in chain.from_iterable(parts)]
        passes.append(np.max(lasts, axis=0))
    done = [max(float(ends[part.last_backward]) for part in own) for own in parts]
    for bucket in simulate_grad_reductions(run, parts, exchanges, (starts, ends)):
        done[bucket.rank] = max(done[bucket.rank], bucket.end_s)
    updates = update_phases(run, sum_rank_times(run, chunk_times(run)), held).totals_s
    step_s = max(done) + max(updates)
    if skips_optimizer_barrier(run):
        begun = [
            float(begins[own[0].first_forward]) - floors.get(own[0].first_forward, 0.0)
            for own in parts
        ]
        step_s = max(d + u - b for d, u, b in zip(done, updates, begun, strict=True))
    return SimulatedReplicas(passes_s=np.concatenate(passes), step_s=step_s)


def _batches(sets: int, most: int) -> list[int]:
    return [min(most, sets - first) for first in range(0, sets, most)]


def _lengths_s(actions: ActionColumns, costs: ActionCosts, drawn: tuple[Floats, Floats]) -> Floats:
    """Return how long every action takes in every replica."""
    stretch, load = drawn
    lengths: Floats = costs.noiseless_s.sum(axis=1)[:, None] + costs.imbalance_growth_s.sum(axis=1)[
        :, None
    ] * (load - 1)
    second = np.flatnonzero(actions.is_concurrent)
    lengths[second - 1] += lengths[second]
    return lengths * stretch
