"""One training step, event by event: the schedule's own actions with predicted durations.

Every rank runs its actions in the order the schedule gives, each as soon as the rank is free and
its inputs are there. Transfers leave on a lane of their own, parameters and gradients travel on
another. The optimizer waits for all ranks, because the gradient norm does. Copies to and from host
memory lengthen the passes that wait for them.

Ranks that do the same are folded: one rank stands for each pipeline stage, so the cost does not
depend on tensor, context, expert or data parallelism.
"""

from collections.abc import Mapping
from functools import cached_property
from operator import sub
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from meshwright.errors import InputError
from meshwright.policy.pipeline import Schedule, for_layout
from meshwright.policy.pipeline.earliest import without_transfers
from meshwright.predict.adapters import trained_parameters
from meshwright.predict.bubble import ends_apart, hop_s, rank_times
from meshwright.predict.buckets import exchange_of
from meshwright.predict.run import Run
from meshwright.predict.simulate_exchange import Bucket, gathers_of, parts_of, reductions_of
from meshwright.predict.simulate_noise import QUIET, Floats, Noise
from meshwright.predict.simulate_passes import (
    PASSES,
    Ints,
    Listed,
    listed,
    noisy_pieces,
    pass_costs,
    slowdown_problems,
)
from meshwright.predict.simulate_plan import Clocked, Message, Plan, clock, plan_of
from meshwright.predict.simulate_turns import clock_by_turns, seats_of, stretched
from meshwright.predict.stage_time import chunk_times, sent_bytes
from meshwright.predict.step import update_phases

if TYPE_CHECKING:
    from meshwright.timeline import Timeline

__all__ = ["PASSES", "Actions", "Sends", "SimulatedStep", "simulate_step"]


class Actions(NamedTuple):
    """Every compute action with its place in time, rank by rank in the order they run."""

    rank: Ints
    """The pipeline rank."""
    op: Ints
    """Index into `PASSES`."""
    chunk: Ints
    microbatch: Ints
    joined: npt.NDArray[np.bool_]
    """Runs beside the action before it."""
    start_s: Floats
    end_s: Floats
    pieces_s: Floats
    """Row by row the `Pieces` that an action's time is spent on; of two joined actions, the first
    row has what both take."""


class Sends(NamedTuple):
    """Every transfer between pipeline ranks."""

    rank: Ints
    """The sending pipeline rank."""
    to: Ints
    """The receiving pipeline rank."""
    chunk: Ints
    """The chunk whose result is sent."""
    microbatch: Ints
    forward: npt.NDArray[np.bool_]
    """Activations to the next chunk, or gradients to the one before."""
    start_s: Floats
    end_s: Floats


class SimulatedStep(msgspec.Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """One simulated training step: when everything happened on one rank of every stage."""

    run: Run
    """What was simulated."""
    schedule: Schedule
    """The order that was executed."""
    actions: Actions
    """The passes."""
    sends: Sends
    """The transfers between stages."""
    sent_bytes: int
    """Payload of one transfer."""
    buckets: tuple[Bucket, ...]
    """Gathers of parameters and reductions of gradients that do not travel with every pass."""
    gathered_s: tuple[float, ...]
    """How long after its gathers start a rank may begin its first pass."""
    optimizer_s: tuple[float, ...]
    """Gradient norm and update, per rank."""
    offload_s: tuple[float, ...]
    """Exposed transfers to and from host memory around the update, per rank."""

    @cached_property
    def done_s(self) -> tuple[float, ...]:
        """When every rank has finished its passes."""
        ends = np.zeros(self.schedule.ranks)
        np.maximum.at(ends, self.actions.rank, self.actions.end_s)
        return tuple(ends.tolist())

    @cached_property
    def exchange_s(self) -> tuple[float, ...]:
        """Exposed reduction of gradients after the last pass, per rank."""
        late = [0.0] * self.schedule.ranks
        for bucket in self.buckets:
            late[bucket.rank] = max(late[bucket.rank], bucket.end_s - self.done_s[bucket.rank])
        return tuple(late)

    @cached_property
    def begun_s(self) -> tuple[float, ...]:
        """When every rank begins with the step, its first gathers included."""
        if not ends_apart(self.run):
            return (0.0,) * self.schedule.ranks
        starts = np.full(self.schedule.ranks, np.inf)
        np.minimum.at(starts, self.actions.rank, self.actions.start_s)
        return tuple((starts - np.array(self.gathered_s)).tolist())

    @cached_property
    def update_start_s(self) -> tuple[float, ...]:
        """When every rank updates: all once the last has its gradients, or each by itself."""
        own = tuple(map(sum, zip(self.done_s, self.exchange_s, strict=True)))
        return own if ends_apart(self.run) else (max(own),) * len(own)

    @cached_property
    def step_s(self) -> float:
        """Seconds of the step; where ranks end apart, the longest round of one rank."""
        ends = map(sum, zip(self.update_start_s, self.offload_s, self.optimizer_s, strict=True))
        return float(max(map(sub, ends, self.begun_s)))

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds every rank spends on its passes, their exposed transfers included."""
        own = ~self.actions.joined
        spent = (self.actions.end_s - self.actions.start_s)[own]
        return tuple(
            np.bincount(self.actions.rank[own], spent, minlength=self.schedule.ranks).tolist()
        )

    @cached_property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds every rank waits for others: bubble, late transfers, slower peers, parameters."""
        around = self.exchange_s, self.offload_s, self.optimizer_s
        spent = zip(self.busy_s, *around, strict=True)
        return tuple(max(0.0, self.step_s - sum(one)) for one in spent)

    def timeline(self, *, most_layer_spans: int = 400_000) -> "Timeline":
        """Return the step as a timeline, one rank per pipeline stage.

        Passes are drawn layer by layer; where that takes more than `most_layer_spans`, a pass is
        one kernel and each kind of communication in it one span.
        """
        from meshwright.predict.simulate_timeline import timeline_of

        return timeline_of(self, most_layer_spans)


def simulate_step(
    run: Run,
    *,
    schedule: Schedule | None = None,
    slowdown: Mapping[int, float] | None = None,
    jitter_cv: float = 0.0,
    noise: Noise | None = None,
    seed: int = 0,
) -> SimulatedStep:
    """Execute one training step in virtual time.

    Args:
        run: Model, cluster, layout and batch.
        schedule: The order to execute; None takes the layout's.
        slowdown: For single pipeline ranks, how many times longer their passes take.
        jitter_cv: Short for a noise of jitter alone.
        noise: How passes differ from their predicted length. It describes one replica; a job of
            many waits for its slowest one, see `simulate_replicas`.
        seed: Where the random factors start; the same seed gives the same step.

    Raises:
        InputError: where an option does not fit, or the schedule cannot finish.
    """
    noise = _noise(run, slowdown or {}, jitter_cv, noise)
    if schedule is None:
        schedule = for_layout(run.layout, run.microbatches)
    elif schedule.has_transfers:
        schedule = without_transfers(schedule)
    plan, order = plan_of(schedule), listed(schedule)
    costs = pass_costs(run, plan, order)
    pieces = noisy_pieces(run, order, costs, noise=noise, slowdown=slowdown or {}, seed=seed)
    update = update_phases(run, rank_times(run, chunk_times(run)), trained_parameters(run))
    clocked, buckets, gathered = _clocked(run, plan, order, pieces.sum(axis=1))
    return SimulatedStep(
        run=run,
        schedule=schedule,
        actions=Actions(*order, np.array(clocked.start_s), np.array(clocked.end_s), pieces),
        sends=_sends(plan.messages, clocked),
        sent_bytes=round(sent_bytes(run)),
        buckets=buckets,
        gathered_s=tuple(gathered),
        optimizer_s=update.updates,
        offload_s=update.transfers or (0.0,) * run.layout.pp,
    )


def _noise(run: Run, slowdown: Mapping[int, float], jitter_cv: float, noise: Noise | None) -> Noise:
    """Return the noise asked for; raise with all that is wrong with the options."""
    problems = slowdown_problems(slowdown, run.layout.pp)
    found = noise or QUIET
    try:
        found = msgspec.structs.replace(found, jitter_cv=jitter_cv or found.jitter_cv)
    except InputError as error:
        problems += error.problems
    if problems:
        raise InputError(problems)
    return found


def _clocked(
    run: Run, plan: Plan, order: Listed, lengths: Floats
) -> tuple[Clocked[float], tuple[Bucket, ...], list[float]]:
    """Run the passes, gathers ahead of them and reductions behind them."""
    exchanges = [exchange_of(run, held) for held in trained_parameters(run)]
    parts = parts_of(run, order)
    gathers, floors = gathers_of(run, parts, exchanges, lengths)
    blocking, shared = not run.layout.overlap_pp, run.measured.shared_cores if run.measured else 0
    if not shared:
        clocked = clock(
            plan, lengths.tolist(), hop_s(run), blocking=blocking, not_before_s=floors, zero=0.0,
            later=max,
        )  # fmt: skip
        ends = None
    else:
        turns = -(-run.layout.gpus // shared)  # that an exchange of all ranks at once consists of
        clocked, ends = clock_by_turns(
            plan, lengths.tolist(), hop_s(run), seats_of(run.layout, shared),
            after_s=[exchange.reduce_s / turns for exchange in exchanges], blocking=blocking,
            not_before_s=floors,
        )  # fmt: skip
    passes = np.array(clocked.start_s), np.array(clocked.end_s)
    gathered = [floors.get(own[0].first, 0.0) for own in parts]
    reductions = reductions_of(run, parts, exchanges, passes)
    if ends is not None:
        reductions = stretched(reductions, ends)
    return clocked, (*gathers, *reductions), gathered


def _sends(messages: list[Message], clocked: Clocked[float]) -> Sends:
    table = np.array(messages, dtype=np.int64).reshape(len(messages), len(Message._fields))
    rank, to, chunk, microbatch, forward = table.T
    return Sends(
        rank,
        to,
        chunk,
        microbatch,
        forward.astype(np.bool_),
        np.array(clocked.leaves_s),
        np.array(clocked.comes_s),
    )
