"""Every replica of a job with its own luck: the step ends when the slowest one has.

Replicas run the same schedule with their own jitter, slow GPUs and loads of experts, and meet when
gradients are reduced. All of them are simulated, many at a time; those that exchange tokens between
experts run in step and count as one. So the slowest of many is drawn, not estimated.
"""

from functools import cached_property
from itertools import chain

import msgspec
import numpy as np

from meshwright.policy.pipeline import for_layout
from meshwright.predict.adapters import trained_parameters
from meshwright.predict.bubble import ends_apart, hop_s, rank_times
from meshwright.predict.buckets import exchange_of
from meshwright.predict.run import Run
from meshwright.predict.simulate_exchange import gathers_of, parts_of, reductions_of
from meshwright.predict.simulate_noise import Floats, Noise, tied_replicas
from meshwright.predict.simulate_passes import Listed, PassCosts, draw_replicas, listed, pass_costs
from meshwright.predict.simulate_plan import clock, plan_of
from meshwright.predict.stage_time import chunk_times
from meshwright.predict.step import update_phases

_AT_ONCE = 2_000_000
"""Passes of all replicas that are run at a time: about a hundred megabytes."""


class Replicas(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """How long the replicas of one job take for a step."""

    passes_s: Floats
    """When each replica, or each set that runs in step, has done its passes."""
    step_s: float
    """Seconds of the step, which waits for the slowest."""

    @cached_property
    def waiting_s(self) -> float:
        """Seconds that a replica waits for the slowest one, on average."""
        return float(self.passes_s.max() - self.passes_s.mean())


def simulate_replicas(run: Run, noise: Noise, *, seed: int = 0) -> Replicas:
    """Execute one training step of every replica in virtual time.

    The same seed gives the same step; other seeds show how much steps differ.
    """
    schedule = for_layout(run.layout, run.microbatches)
    plan, order = plan_of(schedule), listed(schedule)
    costs = pass_costs(run, plan, order)
    held = trained_parameters(run)
    exchanges, parts = [exchange_of(run, one) for one in held], parts_of(run, order)
    _, floors = gathers_of(run, parts, exchanges, costs.usual_s.sum(axis=1))
    draw = np.random.default_rng(seed)
    sets = max(1, run.layout.dp // tied_replicas(run))
    passes = []
    # A reduction starts when the last replica has its gradients.
    begins, starts, ends = (np.full(plan.actions, first) for first in (np.inf, 0.0, 0.0))
    for count in _batches(sets, max(1, _AT_ONCE // plan.actions)):
        clocked = clock(
            plan,
            list(_lengths_s(order, costs, draw_replicas(run, order, draw, noise, count))),
            hop_s(run),
            blocking=not run.layout.overlap_pp,
            not_before_s=floors,
            zero=np.zeros(count),
            later=np.maximum,
        )
        for part in chain.from_iterable(parts):
            first, last = part.first, part.last
            begins[first] = min(begins[first], clocked.start_s[first].min())
            starts[last] = max(starts[last], clocked.start_s[last].max())
            ends[last] = max(ends[last], clocked.end_s[last].max())
        lasts = [clocked.end_s[part.last] for part in chain.from_iterable(parts)]
        passes.append(np.max(lasts, axis=0))
    done = [max(float(ends[part.last]) for part in own) for own in parts]
    for bucket in reductions_of(run, parts, exchanges, (starts, ends)):
        done[bucket.rank] = max(done[bucket.rank], bucket.end_s)
    updates = update_phases(run, rank_times(run, chunk_times(run)), held).wholes
    step_s = max(done) + max(updates)
    if ends_apart(run):
        begun = [float(begins[own[0].first]) - floors.get(own[0].first, 0.0) for own in parts]
        step_s = max(d + u - b for d, u, b in zip(done, updates, begun, strict=True))
    return Replicas(passes_s=np.concatenate(passes), step_s=step_s)


def _batches(sets: int, most: int) -> list[int]:
    return [min(most, sets - first) for first in range(0, sets, most)]


def _lengths_s(actions: Listed, costs: PassCosts, drawn: tuple[Floats, Floats]) -> Floats:
    """Return how long every action takes in every replica."""
    stretch, load = drawn
    lengths: Floats = costs.usual_s.sum(axis=1)[:, None] + costs.growth_s.sum(axis=1)[:, None] * (
        load - 1
    )
    second = np.flatnonzero(actions.joined)
    lengths[second - 1] += lengths[second]
    return lengths * stretch
