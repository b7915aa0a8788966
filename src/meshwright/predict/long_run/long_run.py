"""A run of weeks: failures, checkpoints, restarts and spare nodes between a step and a date.

Failures come at random with a constant rate, also while the job restarts. It then goes back to the
newest checkpoint that was completely written. From that alone follows, exactly, how much of the
time moves the run forward:

    useful = interval · λ · exp(−λ·(delay + restart)) / (exp(λ·(interval + pause)) − 1)

with λ failures per second: the model of Daly 2006 ("A higher order estimate of the optimum
checkpoint interval for restart dumps"), to which `delay` is added, the write that goes on behind.
A life from restart to failure lasts 1/λ on average; of it k intervals count where it was at least
k intervals, k pauses and one delay long.

Planned stops, slow nodes and failures of several nodes at once are not in it.
"""

import math
import sys
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.long_run.checkpoint_cost import CheckpointCost, predict_checkpoint
from meshwright.predict.long_run.reliability import RELIABILITY, Reliability
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.workload import TrainingWorkload

MIN_GOODPUT = 1e-3
"""A run that moves forward for a smaller share of the time is refused: it has no end."""
MAX_SPARES_PER_NODE = 10
"""No more spares than this for each node of the job are tried."""


class TimeShares(NamedTuple):
    """What a job does with its time while it need not wait for a node; adds up to 1."""

    goodput: float
    """Steps that count."""
    checkpointing: float
    """Pauses for checkpoints that count."""
    lost_work: float
    """Steps and pauses after the checkpoint that a failure goes back to."""
    restarts: float
    """From a failure until the next step."""


class LongRun(msgspec.Struct, frozen=True, kw_only=True):
    """What training on all tokens takes: the calendar, the GPU-hours, and where time goes."""

    goodput: float
    """Share of the time in which steps are made that count."""
    calendar_s: float
    """From the first step to the last; the sum of the five parts below."""
    useful_s: float
    """Steps that count: what the run would take if nothing broke."""
    checkpointing_s: float
    """Pauses for checkpoints."""
    lost_work_s: float
    """Work done again after failures."""
    restarts_s: float
    """Detecting, replacing, loading, starting."""
    waiting_s: float
    """No spare node is left and a repair is awaited."""
    mtbf_s: float
    """Mean time between failures of the job."""
    expected_failures: float
    """Failures to expect over the run."""
    interval_s: float
    """Training time between two checkpoints."""
    interval_steps: int
    """The same in steps."""
    checkpoint: CheckpointCost
    """What one of them costs."""
    restart_s: float
    """One restart, a node at hand."""
    spares: int
    """Nodes that stand by."""
    gpu_hours: float
    """GPUs of the job and of the spare nodes, times the calendar."""
    price: float | None
    """US dollars for them; None where the cluster has no price."""
    assumed: tuple[str, ...]
    """What the cluster does not say and was taken from `Reliability`."""


def predict_long_run(
    work: JobSpec, step_s: float, reliability: Reliability = RELIABILITY
) -> LongRun:
    """Predict a whole training run from the time of one step.

    Raises:
        InputError: where the work is no training, the step no time, or the run cannot end.
    """
    training = _checked(work, step_s)
    cluster, gpus = work.cluster, work.layout.gpus
    failures_per_s, assumed = _failures_per_s(work, reliability)
    checkpoint = predict_checkpoint(work, reliability)
    restart_s = checkpoint.load_s + sum(
        (reliability.detect_s, reliability.diagnose_s, reliability.replace_s, reliability.start_s)
    )
    steps = _interval_steps(training.num_steps, step_s, checkpoint, failures_per_s, reliability)
    shares = predict_time_shares(
        steps * step_s,
        pause_s=checkpoint.pause_s,
        delay_s=checkpoint.delay_s,
        restart_s=restart_s,
        failures_per_s=failures_per_s,
    )
    load = reliability.node_loss_share * failures_per_s * reliability.repair_s
    nodes = -(-gpus // cluster.gpus_per_node)
    spares = _spares(work, nodes, load, reliability)
    running = 1.0 - spare_wait_share(load, spares)
    if shares.goodput * running < MIN_GOODPUT:
        raise _endless(shares, running)
    calendar_s = training.num_steps * step_s / (shares.goodput * running)
    gpu_hours = (gpus + spares * cluster.gpus_per_node) * calendar_s / 3600
    hourly = cluster.price_per_gpu_hour
    return LongRun(
        goodput=shares.goodput * running,
        calendar_s=calendar_s,
        useful_s=training.num_steps * step_s,
        checkpointing_s=calendar_s * running * shares.checkpointing,
        lost_work_s=calendar_s * running * shares.lost_work,
        restarts_s=calendar_s * running * shares.restarts,
        waiting_s=calendar_s * (1.0 - running),
        mtbf_s=1 / failures_per_s if failures_per_s else math.inf,
        expected_failures=calendar_s * running * failures_per_s,
        interval_s=steps * step_s,
        interval_steps=steps,
        checkpoint=checkpoint,
        restart_s=restart_s,
        spares=spares,
        gpu_hours=gpu_hours,
        price=None if hourly is None else gpu_hours * hourly,
        assumed=assumed,
    )


def predict_time_shares(
    interval_s: float, *, pause_s: float, delay_s: float, restart_s: float, failures_per_s: float
) -> TimeShares:
    """Return what a job that checkpoints every `interval_s` of training does with its time."""
    cycle_s = interval_s + pause_s
    if failures_per_s * cycle_s < sys.float_info.min:
        return TimeShares(interval_s / cycle_s, pause_s / cycle_s, 0.0, 0.0)
    # Written so that no exponential can overflow, however long the interval.
    survives = math.exp(-failures_per_s * (cycle_s + delay_s + restart_s))
    useful = interval_s * failures_per_s * survives / -math.expm1(-failures_per_s * cycle_s)
    checkpointing = useful * pause_s / interval_s
    restarts = -math.expm1(-failures_per_s * restart_s)
    return TimeShares(useful, checkpointing, 1.0 - restarts - useful - checkpointing, restarts)


def optimal_checkpoint_interval_s(pause_s: float, failures_per_s: float) -> float:
    """Return the training time between checkpoints that makes the useful share largest.

    Its derivative vanishes where 1 − x = exp(−x − d), with x and d the interval and the pause in
    units of 1/λ; restart and delay drop out. Young's √(2·d) lies above the root, from where
    Newton's steps fall towards it.
    """
    if failures_per_s == 0:
        return math.inf
    pause = pause_s * failures_per_s
    if pause == 0:
        return 0.0
    x = min(1.0, math.sqrt(2 * pause))
    for _ in range(100):
        slope = math.expm1(-x - pause)
        step = (x + slope) / -slope
        x -= step
        if step <= 1e-12 * x:
            break
    return x / failures_per_s


def spare_wait_share(load: float, spares: int) -> float:
    """Return the share of the time in which no spare is left and the job waits for a repair.

    `load` is the mean number of nodes in repair if the job never waited. A waiting job loses no
    nodes, so this is Erlang's loss formula with `spares + 1` servers, which holds for repair times
    of any distribution.
    """
    blocked = 1.0
    for servers in range(1, spares + 2):
        blocked = load * blocked / (servers + load * blocked)
        if blocked == 0:
            break
    return blocked


def find_cheapest_spares(nodes: int, load: float, most: float = math.inf) -> int:
    """Return the spare nodes, up to `most`, with which the run needs the fewest GPU-hours."""
    best, fewest, spares, blocked = 0, math.inf, 0, 1.0
    while nodes + spares < fewest and spares <= most:
        offered, servers = load * blocked, spares + 1
        blocked = offered / (servers + offered)
        cost = (nodes + spares) * (servers + offered) / servers
        if cost < fewest:
            best, fewest = spares, cost
        spares += 1
    return best


def _checked(work: JobSpec, step_s: float) -> TrainingWorkload:
    bounds = FieldChecker()
    bounds.positive(step_s=step_s)
    if not isinstance(work.workload, TrainingWorkload):
        bounds.add("workload", "a long run needs a training workload", "give a Training")
    bounds.raise_problems()
    assert isinstance(work.workload, TrainingWorkload)
    return work.workload


def _failures_per_s(work: JobSpec, reliability: Reliability) -> tuple[float, tuple[str, ...]]:
    """Return the job's failure rate, and what had to be assumed about the cluster."""
    assumed = []
    rate = reliability.failures_per_gpu_hour
    if rate is None:
        rate = work.cluster.failures_per_gpu_hour
    if rate is None:
        rate = reliability.usual_failures_per_gpu_hour
        assumed.append(
            f"{work.cluster.name} has no failure rate: {rate:g} per GPU and hour is assumed, "
            "Llama 3's by default"
        )
    if work.cluster.storage is None:
        each = reliability.gpu_storage_bytes_per_s / 1e6
        assumed.append(f"{work.cluster.name} has no storage: {each:g} MB/s for each GPU is assumed")
    return rate * work.layout.gpus / 3600, tuple(assumed)


def _interval_steps(
    total: int,
    step_s: float,
    checkpoint: CheckpointCost,
    failures_per_s: float,
    reliability: Reliability,
) -> int:
    """Return the steps between two checkpoints: those asked for, or the best."""
    # One checkpoint must be written before the next is taken.
    least = min(total, max(1, math.ceil((checkpoint.delay_s - checkpoint.pause_s) / step_s)))
    asked_s = reliability.checkpoint_interval_s
    if asked_s is not None:
        steps = min(total, max(1, round(asked_s / step_s)))
        if steps < least:
            what = (
                f"{asked_s:g} s is less than the {checkpoint.delay_s:.3g} s that one checkpoint "
                "takes to write"
            )
            fix = f"use {least * step_s:.4g} or more, or faster storage"
            raise InputError([Problem("checkpoint_interval_s", what, fix)])
        return steps
    best = min(
        optimal_checkpoint_interval_s(checkpoint.pause_s, failures_per_s) / step_s, float(total)
    )

    def useful(steps: int) -> float:
        # Delay and restart scale all intervals alike.
        return predict_time_shares(
            steps * step_s,
            pause_s=checkpoint.pause_s,
            delay_s=0.0,
            restart_s=0.0,
            failures_per_s=failures_per_s,
        ).goodput

    # The share rises up to the best interval and falls behind it.
    around = (math.floor(best), math.ceil(best))
    return max((min(total, max(least, steps)) for steps in around), key=useful)


def _spares(work: JobSpec, nodes: int, load: float, reliability: Reliability) -> int:
    """Return the spare nodes asked for, or the cheapest number that the cluster can have."""
    room = math.inf if work.cluster.max_nodes is None else work.cluster.max_nodes - nodes
    if reliability.spares is None:
        return find_cheapest_spares(nodes, load, min(room, MAX_SPARES_PER_NODE * nodes))
    if reliability.spares > room:
        what = f"{work.cluster.name} has {room} nodes beside the job's {nodes:,}"
        raise InputError([Problem("spares", what, f"use {room} or fewer")])
    return reliability.spares


def _endless(shares: TimeShares, running: float) -> InputError:
    """Say what keeps a run from ending."""
    causes = {
        "checkpoints": shares.checkpointing * running,
        "work done again": shares.lost_work * running,
        "restarts": shares.restarts * running,
        "waiting for repairs": 1.0 - running,
    }
    worst = max(causes, key=lambda cause: causes[cause])
    what = (
        f"only {shares.goodput * running:.2g} of the time moves the run forward; "
        f"{worst} take {causes[worst]:.1%}"
    )
    fix = "use fewer GPUs, faster restarts or storage, more spares, or a lower failure rate"
    return InputError([Problem("reliability", what, fix)])
