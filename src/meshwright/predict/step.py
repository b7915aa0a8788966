"""One training step in closed form: fast enough for a search, and split by cause.

    step = microbatches × slowest stage + bubble + exposed transfers and exchanges + optimizer

The event simulation executes the same stages under the schedule itself; this is its quick twin.
"""

import msgspec

from meshwright.predict.block_comm import neighbours, place
from meshwright.predict.constants import StepConstants
from meshwright.predict.cost import memory_s, optimizer_s
from meshwright.predict.network import collective_s
from meshwright.predict.run import Run
from meshwright.predict.stage_time import StageTime, stage_times
from meshwright.spec.layout import RankParameters, rank_parameters
from meshwright.spec.layout.states import MOMENTS, STATE_BYTES
from meshwright.spec.model import flops_per_token


class StepPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """What one training step costs, and where its time goes on the slowest rank."""

    step_s: float
    """Seconds of the step."""
    compute_s: float
    """Forward and backward kernels of all microbatches."""
    recompute_s: float
    """Forward work done a second time."""
    tp_s: float
    """Exposed tensor-parallel communication."""
    cp_s: float
    """Exposed context-parallel communication."""
    ep_s: float
    """Exposed exchange of the experts."""
    pp_s: float
    """Exposed pipeline transfers."""
    dp_s: float
    """Exposed exchange of gradients and parameters."""
    bubble_s: float
    """Waiting for other pipeline stages."""
    optimizer_s: float
    """Gradient norm and update."""
    tokens_per_s: float
    """Tokens of the whole job per second."""
    mfu: float
    """Useful FLOPs, exactly counted, over the peak of the layout's precision."""


def predict_step(run: Run) -> StepPrediction:
    """Predict one training step in closed form."""
    layout, count = run.layout, run.microbatches
    stages = _per_microbatch(run, stage_times(run))
    parameters = rank_parameters(layout, run.model)
    slowest = max(range(len(stages)), key=lambda rank: stages[rank].total)
    stage = stages[slowest]
    bubble, transfers = _pipeline(run, stages, stage)
    if layout.zero == 3:
        # What a pass waits for lengthens every pass, those that fill the pipeline included.
        exchange = sharded_exchange(run, stage, parameters[slowest]) * (count + layout.pp - 1)
    else:
        exchange = gradient_exchange(run, stage, parameters[slowest])
    update = optimizer_update(run, parameters[slowest])
    step_s = count * stage.total + bubble + transfers + exchange + update
    tokens = run.batch * run.length
    flops = flops_per_token(run.model, run.length) * tokens
    peak = run.cluster.gpu.peak_flops(layout.precision) * layout.gpus
    return StepPrediction(
        step_s=step_s,
        compute_s=count * stage.compute,
        recompute_s=count * stage.recompute,
        tp_s=count * stage.tp,
        cp_s=count * stage.cp,
        ep_s=count * stage.ep,
        pp_s=transfers,
        dp_s=exchange,
        bubble_s=bubble,
        optimizer_s=update,
        tokens_per_s=tokens / step_s,
        mfu=flops / (peak * step_s),
    )


def _per_microbatch(run: Run, stages: tuple[StageTime, ...]) -> tuple[StageTime, ...]:
    """Return what a microbatch costs a rank on average.

    DualPipe feeds from both ends: a rank holds two chunks, and each sees half of the microbatches.
    """
    if run.layout.schedule != "dualpipe" or run.layout.pp == 1:
        return stages
    return tuple(StageTime(*(part / 2 for part in stage)) for stage in stages)


def _pipeline(run: Run, stages: tuple[StageTime, ...], slowest: StageTime) -> tuple[float, float]:
    """Return the bubble and the exposed transfers of the layout's schedule."""
    layout, count = run.layout, run.microbatches
    ranks, chunks = layout.pp, layout.virtual_stages
    if ranks == 1:
        return 0.0, 0.0
    sent = 2.0 * run.local_tokens * run.model.hidden
    hop = collective_s(neighbours(run.cluster, layout, "pp"), "send_recv", sent)
    mean = sum(stage.total for stage in stages) / ranks
    fill = 2 * (ranks - 1) * hop
    forward, backward = slowest.forward, slowest.backward
    weight = slowest.weight_gradient
    match layout.schedule:
        case "gpipe":
            # Every stage is passed once each way around the slowest one's microbatches.
            return ranks * mean - slowest.total, fill
        case "1f1b":
            steady = run.constants.p2p_exposed * 2 * (count - 1) * hop
            return _uneven_bubble(stages, count), fill + steady
        case "interleaved":
            return (ranks - 1) * mean / chunks, 2 * (chunks * ranks - 1) * hop
        case "zb-h1":
            left = mean - 2 * weight  # F + I − W (Qi et al. 2024)
        case "zb-h2":
            deep = count >= 2 * ranks - 1
            left = mean - (3 if deep else 2) * weight
        case "zb-v":
            left = (mean - 3 * weight) / 2
        case _:
            # DualPipe and its folded form; chunks are half a rank's work.
            left = (forward + 2 * backward - 3 * weight) / 2
    return (ranks - 1) * max(0.0, left), fill


def _uneven_bubble(stages: tuple[StageTime, ...], count: int) -> float:
    """Return the idle time of the slowest rank under 1F1B with stages of any length.

    The step ends when some stage has done its microbatches, those before it have filled, and the
    round trip through those behind it, as far as its own passes do not cover it, is over.
    """
    totals = [stage.total for stage in stages]
    slowest = max(totals)
    longest = 0.0
    for rank, stage in enumerate(stages):
        behind = sum(totals[rank + 1 :])
        covered = min(len(stages) - 1 - rank, count - 1)
        down = max(0.0, behind - covered * stage.forward)
        back = max(0.0, behind - covered * stage.backward)
        round_trip = down + back if count > len(stages) - rank else max(down, back)
        longest = max(longest, count * stage.total + sum(totals[:rank]) + round_trip)
    return longest - count * slowest


def _gradient_bytes(run: Run) -> float:
    return float(STATE_BYTES[run.layout.gradient_precision])


def gradient_exchange(run: Run, stage: StageTime, held: RankParameters) -> float:
    """Return the exposed exchange after the last microbatch and before the first one."""
    layout, constants = run.layout, run.constants
    if layout.dp * layout.cp == 1 or run.frozen:
        return 0.0
    number = _gradient_bytes(run)
    group = place(run.cluster, layout, "dp-cp")
    dense = float(held.matrices + held.others)
    if layout.zero == 0:
        reduce_s, gather_s = collective_s(group, "all_reduce", dense * number), 0.0
    else:
        reduce_s = collective_s(group, "reduce_scatter", dense * number)
        gather_s = collective_s(group, "all_gather", dense * 2.0)
    if held.experts and layout.expert_dp > 1:
        replicas = place(run.cluster, layout, "expert_dp")
        reduce_s += collective_s(replicas, "reduce_scatter", held.experts * number)
        gather_s += collective_s(replicas, "all_gather", held.experts * 2.0)
    if layout.overlap_gradients:
        reduce_s = _exposed(reduce_s, stage.backward, constants)
    if layout.overlap_parameters:
        gather_s = _exposed(gather_s, stage.forward, constants)
    return reduce_s + gather_s


def _exposed(exchange_s: float, pass_s: float, constants: StepConstants) -> float:
    """Return what an exchange adds to the pass that it hides behind and slows down."""
    window = constants.overlap_share * pass_s
    left = max(constants.bucket_exposed * exchange_s, exchange_s - window)
    return left + constants.sm_share * (exchange_s - left)


def sharded_exchange(run: Run, stage: StageTime, held: RankParameters) -> float:
    """Return the exposed gathers and scatters of fully sharded parameters per microbatch."""
    layout = run.layout
    if layout.dp * layout.cp == 1:
        return 0.0
    group = place(run.cluster, layout, "dp-cp" if layout.shard is None else "shard")
    layers = max(1, run.model.layers // layout.pp)
    each = (held.matrices + held.others + held.experts) / layers
    gather_s = collective_s(group, "all_gather", 2.0 * each)
    scatter_s = (
        0.0 if run.frozen else collective_s(group, "reduce_scatter", _gradient_bytes(run) * each)
    )
    both = gather_s + gather_s + scatter_s
    if not run.software.overlap_sharded:
        return layers * both
    forward, backward = stage.forward / layers, stage.backward / layers
    late = max(0.0, gather_s - forward) + max(0.0, gather_s + scatter_s - backward)
    hidden = run.constants.sm_share * (both - late)
    return layers * (late + hidden) + gather_s + scatter_s


def optimizer_update(run: Run, held: RankParameters) -> float:
    """Return the update: states read and written once, and the norm of the gradients."""
    layout = run.layout
    if run.frozen:
        return 0.0
    shard = layout.shard_degree if layout.zero else 1
    replicas = layout.dp * layout.cp // layout.shard_degree
    experts = max(1, layout.expert_dp // replicas) if layout.zero else 1
    number = (held.matrices + held.others) / shard + held.experts / experts
    moments = 2 * MOMENTS[layout.optimizer] * STATE_BYTES[layout.moment_precision]
    master = 2 * (STATE_BYTES[layout.master_precision] or 2)
    gradient = _gradient_bytes(run)
    moved = (moments + master + gradient + 2) * number
    return optimizer_s(run.costs, moved) + memory_s(run.costs, "gradient_norm", gradient * number)
