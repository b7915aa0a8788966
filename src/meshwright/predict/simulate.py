"""One training step, event by event: the schedule's own actions with predicted durations.

Every rank runs its actions in the order the schedule gives, each as soon as the rank is free and
its inputs are there. Transfers leave on a lane of their own. After its last backward a rank
exchanges gradients; the optimizer waits for all ranks, because the gradient norm does.

Ranks that do the same are folded: one rank stands for each pipeline stage, so the cost does not
depend on tensor, context, expert or data parallelism.
"""

from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from meshwright.errors import InputError, Problem
from meshwright.policy.pipeline import Schedule, for_layout
from meshwright.policy.pipeline.earliest import without_transfers
from meshwright.policy.pipeline.walk import Rules, walk
from meshwright.predict.block_comm import neighbours
from meshwright.predict.network import collective_s
from meshwright.predict.run import Run
from meshwright.predict.simulate_passes import Floats, pieces_of_actions
from meshwright.predict.stage_time import stage_times
from meshwright.predict.step import gradient_exchange, optimizer_update
from meshwright.spec.layout import rank_parameters

if TYPE_CHECKING:
    from meshwright.timeline import Timeline

Ints = npt.NDArray[np.int64]
PASSES = ("F", "B", "I", "W")
"""Forward, full backward, and the input and weight parts of a split one."""


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
    """Row by row the `Pieces` that an action's time is spent on."""


class Sends(NamedTuple):
    """Every transfer between pipeline ranks, sender by sender in the order they leave."""

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
    exchange_s: tuple[float, ...]
    """Exposed exchange of gradients and parameters after the last backward, per rank."""
    optimizer_s: tuple[float, ...]
    """Gradient norm and update, per rank."""

    @cached_property
    def done_s(self) -> tuple[float, ...]:
        """When every rank has finished its passes."""
        ends = np.zeros(self.schedule.ranks)
        np.maximum.at(ends, self.actions.rank, self.actions.end_s)
        return tuple(ends.tolist())

    @cached_property
    def update_start_s(self) -> float:
        """When the last rank has its gradients, so that all may update."""
        return max(map(sum, zip(self.done_s, self.exchange_s, strict=True)))

    @cached_property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.update_start_s + max(self.optimizer_s)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds every rank spends on its passes, their exposed communication included."""
        own = ~self.actions.joined
        spent = (self.actions.end_s - self.actions.start_s)[own]
        return tuple(
            np.bincount(self.actions.rank[own], spent, minlength=self.schedule.ranks).tolist()
        )

    @cached_property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds every rank waits for others: bubble, late transfers, slower peers."""
        spent = zip(self.busy_s, self.exchange_s, self.optimizer_s, strict=True)
        return tuple(max(0.0, self.step_s - sum(one)) for one in spent)

    def timeline(self) -> "Timeline":
        """Return the step as a timeline, one rank per pipeline stage."""
        from meshwright.predict.simulate_timeline import timeline_of

        return timeline_of(self)


def simulate_step(
    run: Run,
    *,
    schedule: Schedule | None = None,
    slowdown: Mapping[int, float] | None = None,
    jitter_cv: float = 0.0,
    seed: int = 0,
) -> SimulatedStep:
    """Execute one training step in virtual time.

    Args:
        run: Model, cluster, layout and batch.
        schedule: The order to execute; None takes the layout's.
        slowdown: For single pipeline ranks, how many times longer their passes take.
        jitter_cv: Coefficient of variation of a random factor on every pass. It describes one
            replica; a job of many waits for its slowest one, the largest of that many seeds.
        seed: Where the random factors start; the same seed gives the same step.

    Raises:
        InputError: where an option does not fit, or the schedule cannot finish.
    """
    if schedule is None:
        schedule = for_layout(run.layout, run.microbatches)
    elif schedule.has_transfers:
        schedule = without_transfers(schedule)
    pieces = pieces_of_actions(run, schedule, slowdown=slowdown, jitter_cv=jitter_cv, seed=seed)
    sent = 2.0 * run.local_tokens * run.model.hidden
    hop_s = 0.0
    if run.layout.pp > 1:
        hop_s = collective_s(neighbours(run.cluster, run.layout, "pp"), "send_recv", sent)
    actions, sends = _execute(schedule, pieces, hop_s, blocking=not run.layout.overlap_pp)
    stages, held = stage_times(run), rank_parameters(run.layout, run.model)
    exchange = [0.0] * run.layout.pp
    if run.layout.zero < 3:
        exchange = [gradient_exchange(run, *one) for one in zip(stages, held, strict=True)]
    return SimulatedStep(
        run=run,
        schedule=schedule,
        actions=actions,
        sends=sends,
        sent_bytes=round(sent),
        exchange_s=tuple(exchange),
        optimizer_s=tuple(optimizer_update(run, one) for one in held),
    )


def _execute(
    schedule: Schedule, pieces: list[Floats], hop_s: float, *, blocking: bool
) -> tuple[Actions, Sends]:
    """Let every rank run its actions in order, each once its inputs are there."""
    rules = Rules(schedule)
    walked = walk(rules)
    if walked.stuck:
        what = f"rank {min(walked.stuck)} waits for ever, so nothing can be simulated"
        raise InputError([Problem("schedule", what, "see what verify says about it")])
    lengths = [rows.sum(axis=1).tolist() for rows in pieces]
    offsets = [0, *accumulate(len(lane) for lane in schedule.actions)]
    starts, ends = [0.0] * offsets[-1], [0.0] * offsets[-1]
    at = [0] * schedule.ranks
    free = [0.0] * schedule.ranks
    line_free = [0.0] * schedule.ranks
    # When a result exists, when it has reached the rank that needs it next, and where it was made.
    made, arrived, maker = ([0.0] * rules.keys, [0.0] * rules.keys, [-1] * rules.keys)
    routes, last = schedule.route_by_microbatch(), schedule.chunks - 1
    sent: list[list[tuple[int, int, int, int, bool, float, float]]] = [[] for _ in at]
    for rank, index in walked.order:
        group = rules.cut[rank][index]
        _, needs, gives = rules.step(group)
        start = free[rank]
        for key in needs:
            there = made[key] if maker[key] == rank else arrived[key]
            start = max(start, there)
        first = at[rank]
        end = start + lengths[rank][first]
        at[rank] = first + len(group)
        for place in range(offsets[rank] + first, offsets[rank] + first + len(group)):
            starts[place], ends[place] = start, end
        for key in gives:
            made[key], maker[key] = end, rank
        free[rank] = end
        for action in group:
            op, chunk, microbatch, _ = action
            step = 1 if op == "F" else -1
            if op == "W" or not 0 <= chunk + step <= last:
                continue
            to = routes[microbatch][chunk + step]
            if to == rank:
                continue
            leaves = max(end, line_free[rank])
            line_free[rank] = comes = leaves + hop_s
            arrived[rules.step((action,))[2][0]] = comes
            sent[rank].append((rank, to, chunk, microbatch, op == "F", leaves, comes))
            if blocking:
                free[rank] = comes
    return _columns(schedule, pieces, starts, ends), _sends(list(chain.from_iterable(sent)))


def _columns(
    schedule: Schedule, pieces: list[Floats], starts: list[float], ends: list[float]
) -> Actions:
    every = list(chain.from_iterable(schedule.actions))
    return Actions(
        rank=np.repeat(np.arange(schedule.ranks), [len(lane) for lane in schedule.actions]),
        op=np.array([PASSES.index(action.op) for action in every], dtype=np.int64),
        chunk=np.array([action.chunk for action in every], dtype=np.int64),
        microbatch=np.array([action.microbatch for action in every], dtype=np.int64),
        joined=np.array([action.joined for action in every], dtype=np.bool_),
        start_s=np.array(starts),
        end_s=np.array(ends),
        pieces_s=np.concatenate(pieces),
    )


def _sends(sent: list[tuple[int, int, int, int, bool, float, float]]) -> Sends:
    table = np.array(sent, dtype=np.float64).reshape(len(sent), len(Sends._fields))
    rank, to, chunk, microbatch = table[:, :4].astype(np.int64).T
    forward = table[:, 4].astype(np.bool_)
    return Sends(rank, to, chunk, microbatch, forward, table[:, 5].copy(), table[:, 6].copy())
