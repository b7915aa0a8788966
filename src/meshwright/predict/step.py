"""One training step in closed form: fast enough for a search, and split by cause.

    step = microbatches × slowest stage + bubble + exposed transfers and exchanges + optimizer

The event simulation executes the same stages under the schedule itself; this is its quick twin.
"""

import msgspec

from meshwright.predict.block_comm import neighbours, place
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
    stages = stage_times(run)
    layout, count = run.layout, run.microbatches
    parameters = rank_parameters(layout, run.model)
    gather = _sharded_exchange(run, stages[0], parameters[0]) if layout.zero == 3 else 0.0
    slowest = max(range(len(stages)), key=lambda rank: stages[rank].total)
    stage = stages[slowest]
    bubble, transfers = _pipeline(run, stages, stage)
    exchange = gather * count
    if layout.zero < 3:
        exchange += _gradient_exchange(run, stage, parameters[slowest])
    update = _optimizer(run, parameters[slowest])
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


def _pipeline(run: Run, stages: tuple[StageTime, ...], slowest: StageTime) -> tuple[float, float]:
    """Return the bubble and the exposed transfers of the layout's schedule."""
    layout, count = run.layout, run.microbatches
    ranks = layout.pp
    if ranks == 1:
        return 0.0, 0.0
    sent = 2.0 * run.local_tokens * run.model.hidden
    hop = collective_s(neighbours(run.cluster, layout, "pp"), "send_recv", sent)
    mean = sum(stage.total for stage in stages) / ranks
    fill = 2 * (ranks - 1) * hop
    exposed = run.constants.p2p_exposed
    if layout.schedule in ("gpipe", "1f1b"):
        # Unequal stages: each passes its own pair once, then all keep the slowest one's pace.
        bubble = sum(stage.total for stage in stages) - slowest.total
        return bubble, fill + exposed * 2 * (count - 1) * hop
    if layout.schedule == "interleaved":
        chunks = layout.virtual_stages
        return (ranks - 1) * mean / chunks, fill + exposed * 2 * count * chunks * hop
    # Zero-bubble kinds fill the wait with weight gradients: F + I − W is left per stage (Qi et
    # al. 2024), nothing where warm-up runs deep enough, and half the pipeline's for DualPipe.
    left = max(0.0, mean - 2 * slowest.weight_gradient)
    share = {"zb-h1": 1.0, "dualpipe": 0.5, "dualpipe-v": 0.5}.get(layout.schedule, 0.0)
    return share * (ranks - 1) * left, fill


def _gradient_bytes(run: Run) -> float:
    return float(STATE_BYTES[run.layout.gradient_precision])


def _gradient_exchange(run: Run, stage: StageTime, held: RankParameters) -> float:
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
    window, least = constants.overlap_share, constants.bucket_exposed
    if layout.overlap_gradients:
        reduce_s = max(least * reduce_s, reduce_s - window * stage.backward)
    if layout.overlap_parameters:
        gather_s = max(least * gather_s, gather_s - window * stage.forward)
    return reduce_s + gather_s


def _sharded_exchange(run: Run, stage: StageTime, held: RankParameters) -> float:
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
    forward, backward = stage.forward / layers, stage.backward / layers
    late = max(0.0, gather_s - forward) + max(0.0, gather_s + scatter_s - backward)
    return layers * late + gather_s + scatter_s


def _optimizer(run: Run, held: RankParameters) -> float:
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
