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
from meshwright.policy.pipeline import PipelineSchedule, build_layout_schedule
from meshwright.policy.pipeline.action_times import remove_transfers
from meshwright.predict.event_sim.action_costs import (
    PASSES,
    ActionColumns,
    Ints,
    apply_noise,
    check_slowdown,
    compute_action_costs,
    list_actions,
)
from meshwright.predict.event_sim.dp_comm import (
    BucketTransfer,
    list_rank_chunks,
    simulate_grad_reductions,
    simulate_param_gathers,
)
from meshwright.predict.event_sim.noise import NO_NOISE, Floats, StepNoise
from meshwright.predict.event_sim.shared_cores import (
    assign_cores,
    extend_reductions,
    run_on_shared_cores,
)
from meshwright.predict.step.grad_buckets import predict_dp_comm
from meshwright.predict.step.optimizer_step import update_phases
from meshwright.predict.step.pipeline_bubble import (
    mean_transfer_s,
    skips_optimizer_barrier,
    sum_rank_times,
)
from meshwright.predict.step.schedule_graph import (
    ActionTimes,
    ScheduleGraph,
    StageTransfer,
    build_schedule_graph,
    run_schedule,
)
from meshwright.predict.step.stage_time import chunk_times, stage_transfer_bytes
from meshwright.predict.training_run.lora_shapes import count_trained_parameters
from meshwright.predict.training_run.training_run import TrainingRun

if TYPE_CHECKING:
    from meshwright.timeline import Timeline

__all__ = ["PASSES", "SimulatedActions", "SimulatedStep", "SimulatedTransfers", "simulate_step"]


class SimulatedActions(NamedTuple):
    """Every compute action with its place in time, rank by rank in the order they run."""

    rank: Ints
    """The pipeline rank."""
    op: Ints
    """Index into `PASSES`."""
    chunk: Ints
    microbatch: Ints
    is_concurrent: npt.NDArray[np.bool_]
    """Runs beside the action before it."""
    start_s: Floats
    end_s: Floats
    breakdown_s: Floats
    """Row by row the `PassBreakdown` of an action's time; of two joined actions, the first
    row has what both take."""


class SimulatedTransfers(NamedTuple):
    """Every transfer between pipeline ranks."""

    rank: Ints
    """The sending pipeline rank."""
    target_rank: Ints
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

    run: TrainingRun
    """What was simulated."""
    schedule: PipelineSchedule
    """The order that was executed."""
    actions: SimulatedActions
    """The passes."""
    transfers: SimulatedTransfers
    """The transfers between stages."""
    transfer_bytes: int
    """Payload of one transfer."""
    buckets: tuple[BucketTransfer, ...]
    """Gathers of parameters and reductions of gradients that do not travel with every pass."""
    param_gather_delay_s: tuple[float, ...]
    """How long after its gathers start a rank may begin its first pass."""
    optimizer_s: tuple[float, ...]
    """Gradient norm and update, per rank."""
    offload_s: tuple[float, ...]
    """Exposed transfers to and from host memory around the update, per rank."""

    @cached_property
    def passes_end_s(self) -> tuple[float, ...]:
        """When every rank has finished its passes."""
        ends = np.zeros(self.schedule.ranks)
        np.maximum.at(ends, self.actions.rank, self.actions.end_s)
        return tuple(ends.tolist())

    @cached_property
    def exposed_grad_reduce_s(self) -> tuple[float, ...]:
        """Exposed reduction of gradients after the last pass, per rank."""
        late = [0.0] * self.schedule.ranks
        for bucket in self.buckets:
            late[bucket.rank] = max(
                late[bucket.rank], bucket.end_s - self.passes_end_s[bucket.rank]
            )
        return tuple(late)

    @cached_property
    def first_start_s(self) -> tuple[float, ...]:
        """When every rank begins with the step, its first gathers included."""
        if not skips_optimizer_barrier(self.run):
            return (0.0,) * self.schedule.ranks
        starts = np.full(self.schedule.ranks, np.inf)
        np.minimum.at(starts, self.actions.rank, self.actions.start_s)
        return tuple((starts - np.array(self.param_gather_delay_s)).tolist())

    @cached_property
    def update_start_s(self) -> tuple[float, ...]:
        """When every rank updates: all once the last has its gradients, or each by itself."""
        own = tuple(map(sum, zip(self.passes_end_s, self.exposed_grad_reduce_s, strict=True)))
        return own if skips_optimizer_barrier(self.run) else (max(own),) * len(own)

    @cached_property
    def step_s(self) -> float:
        """Seconds of the step; where ranks end apart, the longest round of one rank."""
        ends = map(sum, zip(self.update_start_s, self.offload_s, self.optimizer_s, strict=True))
        return float(max(map(sub, ends, self.first_start_s)))

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds every rank spends on its passes, their exposed transfers included."""
        own = ~self.actions.is_concurrent
        spent = (self.actions.end_s - self.actions.start_s)[own]
        return tuple(
            np.bincount(self.actions.rank[own], spent, minlength=self.schedule.ranks).tolist()
        )

    @cached_property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds every rank waits for others: bubble, late transfers, slower peers, parameters."""
        around = self.exposed_grad_reduce_s, self.offload_s, self.optimizer_s
        spent = zip(self.busy_s, *around, strict=True)
        return tuple(max(0.0, self.step_s - sum(one)) for one in spent)

    def build_timeline(self, *, most_layer_spans: int = 400_000) -> "Timeline":
        """Return the step as a timeline, one rank per pipeline stage.

        Passes are drawn layer by layer; where that takes more than `most_layer_spans`, a pass is
        one kernel and each kind of communication in it one span.
        """
        from meshwright.predict.event_sim.step_timeline import build_step_timeline

        return build_step_timeline(self, most_layer_spans)


def simulate_step(
    run: TrainingRun,
    *,
    schedule: PipelineSchedule | None = None,
    slowdown: Mapping[int, float] | None = None,
    jitter_cv: float = 0.0,
    noise: StepNoise | None = None,
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
        schedule = build_layout_schedule(run.layout, run.num_microbatches)
    elif schedule.has_transfers:
        schedule = remove_transfers(schedule)
    plan, order = build_schedule_graph(schedule), list_actions(schedule)
    costs = compute_action_costs(run, plan, order)
    pieces = apply_noise(run, order, costs, noise=noise, slowdown=slowdown or {}, seed=seed)
    update = update_phases(
        run, sum_rank_times(run, chunk_times(run)), count_trained_parameters(run)
    )
    clocked, buckets, gathered = _clocked(run, plan, order, pieces.sum(axis=1))
    return SimulatedStep(
        run=run,
        schedule=schedule,
        actions=SimulatedActions(
            *order, np.array(clocked.start_s), np.array(clocked.end_s), pieces
        ),
        transfers=_sends(plan.transfers, clocked),
        transfer_bytes=round(stage_transfer_bytes(run)),
        buckets=buckets,
        param_gather_delay_s=tuple(gathered),
        optimizer_s=update.updates_s,
        offload_s=update.transfers_s or (0.0,) * run.layout.pp,
    )


def _noise(
    run: TrainingRun, slowdown: Mapping[int, float], jitter_cv: float, noise: StepNoise | None
) -> StepNoise:
    """Return the noise asked for; raise with all that is wrong with the options."""
    problems = check_slowdown(slowdown, run.layout.pp)
    found = noise or NO_NOISE
    try:
        found = msgspec.structs.replace(found, jitter_cv=jitter_cv or found.jitter_cv)
    except InputError as error:
        problems += error.problems
    if problems:
        raise InputError(problems)
    return found


def _clocked(
    run: TrainingRun, plan: ScheduleGraph, order: ActionColumns, lengths: Floats
) -> tuple[ActionTimes[float], tuple[BucketTransfer, ...], list[float]]:
    """Run the passes, gathers ahead of them and reductions behind them."""
    exchanges = [predict_dp_comm(run, held) for held in count_trained_parameters(run)]
    parts = list_rank_chunks(run, order)
    gathers, floors = simulate_param_gathers(run, parts, exchanges, lengths)
    blocking, shared = not run.layout.overlap_pp, run.measured.shared_cores if run.measured else 0
    if not shared:
        clocked = run_schedule(
            plan,
            lengths.tolist(),
            mean_transfer_s(run),
            blocking=blocking,
            not_before_s=floors,
            zero=0.0,
            later=max,
        )
        ends = None
    else:
        turns = -(-run.layout.gpus // shared)  # that an exchange of all ranks at once consists of
        clocked, ends = run_on_shared_cores(
            plan, lengths.tolist(), mean_transfer_s(run), assign_cores(run.layout, shared),
            after_s=[exchange.reduce_s / turns for exchange in exchanges], blocking=blocking,
            not_before_s=floors,
        )  # fmt: skip
    passes = np.array(clocked.start_s), np.array(clocked.end_s)
    gathered = [floors.get(own[0].first_forward, 0.0) for own in parts]
    reductions = simulate_grad_reductions(run, parts, exchanges, passes)
    if ends is not None:
        reductions = extend_reductions(reductions, ends)
    return clocked, (*gathers, *reductions), gathered


def _sends(messages: list[StageTransfer], clocked: ActionTimes[float]) -> SimulatedTransfers:
    table = np.array(messages, dtype=np.int64).reshape(len(messages), len(StageTransfer._fields))
    rank, to, chunk, microbatch, forward = table.T
    return SimulatedTransfers(
        rank,
        to,
        chunk,
        microbatch,
        forward.astype(np.bool_),
        np.array(clocked.departure_s),
        np.array(clocked.arrival_s),
    )
