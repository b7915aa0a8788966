"""One training step in closed form: fast enough for a search, and split by cause.

    step = passes of the slowest rank + bubble + exposed transfers and exchanges + optimizer

The event simulation executes the same stages under the schedule itself; this is its quick twin.
"""

import msgspec

from meshwright.predict.block_comm import place
from meshwright.predict.bubble import per_microbatch, pipeline, rank_times
from meshwright.predict.buckets import around_passes
from meshwright.predict.cost import memory_s, optimizer_s
from meshwright.predict.interval import bounds
from meshwright.predict.network import collective_s
from meshwright.predict.run import Run
from meshwright.predict.stage_time import StageTime, chunk_times
from meshwright.spec.layout import RankParameters, rank_parameters
from meshwright.spec.layout.states import MOMENTS, STATE_BYTES
from meshwright.spec.model import flops_per_token


class StepPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """What one training step costs, and where its time goes on the slowest rank."""

    step_s: float
    """Seconds of the step."""
    low_s: float
    """Nine of ten published steps lie between this and `high_s`."""
    high_s: float
    """The upper end."""
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
    times = chunk_times(run)
    stages, parameters = rank_times(run, times), rank_parameters(layout, run.model)
    late = sharded_waits(run, stages, parameters)
    pipe = pipeline(run, times, late)
    stage, wait = per_microbatch(run, stages[pipe.busiest]), late[pipe.busiest]
    # Passes side by side hide exchange that they would wait for one by one.
    apart = count * stage.total * (1 + wait)
    hidden = min(max(0.0, apart - pipe.busy_s), count * stage.ep)
    bubble = max(0.0, pipe.end_s - (apart - hidden) - pipe.transfers_s)
    updates = {held: optimizer_update(run, held) for held in set(parameters)}
    around = around_passes(run, parameters, tuple(updates[held] for held in parameters), pipe)
    exchange = count * stage.total * wait + around.exchange_s
    passes = count * stage.total - hidden
    step_s = passes + bubble + pipe.transfers_s + exchange + around.update_s
    exposed = count * (stage.tp + stage.cp) + pipe.transfers_s + exchange
    low_s, high_s = bounds(run, step_s, exposed)
    tokens = run.batch * run.length
    flops = flops_per_token(run.model, run.length) * tokens
    peak = run.cluster.gpu.peak_flops(layout.precision) * layout.gpus
    return StepPrediction(
        step_s=step_s,
        low_s=low_s,
        high_s=high_s,
        compute_s=count * stage.compute,
        recompute_s=count * stage.recompute,
        tp_s=count * stage.tp,
        cp_s=count * stage.cp,
        ep_s=count * stage.ep - hidden,
        pp_s=pipe.transfers_s,
        dp_s=exchange,
        bubble_s=bubble,
        optimizer_s=around.update_s,
        tokens_per_s=tokens / step_s,
        mfu=flops / (peak * step_s),
    )


def _gradient_bytes(run: Run) -> float:
    return float(STATE_BYTES[run.layout.gradient_precision])


def sharded_waits(
    run: Run, stages: tuple[StageTime, ...], parameters: tuple[RankParameters, ...]
) -> tuple[float, ...]:
    """Return, by rank, how long a pass waits for sharded parameters per second it runs."""
    if run.layout.zero < 3:
        return (0.0,) * run.layout.pp
    return tuple(
        sharded_exchange(run, *one) / one[0].total for one in zip(stages, parameters, strict=True)
    )


def sharded_exchange(run: Run, stage: StageTime, held: RankParameters) -> float:
    """Return the exposed gathers and scatters of fully sharded parameters per microbatch."""
    layout, software = run.layout, run.software
    if layout.dp * layout.cp == 1:
        return 0.0
    layers = max(1, run.model.layers // layout.pp)
    gather_s, scatter_s = _layer_exchange(run, held, layers)
    early = software.overlap_sharded and layout.overlap_parameters
    behind = software.overlap_sharded and layout.overlap_gradients
    forward = stage.forward / layers if early else 0.0
    backward = stage.backward / layers
    late = max(0.0, gather_s - forward)
    late += max(0.0, early * gather_s + behind * scatter_s - backward)
    late += (not early) * gather_s + (not behind) * scatter_s
    hidden = run.constants.sm_share * (gather_s + gather_s + scatter_s - late)
    return layers * (late + hidden) + early * gather_s + behind * scatter_s


def _layer_exchange(run: Run, held: RankParameters, layers: int) -> tuple[float, float]:
    """Return how long one layer's parameters are gathered and its gradients scattered."""
    layout = run.layout
    dense = (held.matrices + held.others) / layers
    parts = [("dp-cp" if layout.shard is None else "shard", dense)]
    if held.experts and layout.expert_dp > 1:
        parts.append(("expert_dp", held.experts / layers))
    gather_s = scatter_s = 0.0
    for axes, each in parts:
        group = place(run.cluster, layout, axes)
        gather_s += collective_s(group, "all_gather", 2.0 * each)
        if not run.frozen:
            scatter_s += collective_s(group, "reduce_scatter", _gradient_bytes(run) * each)
    return gather_s, scatter_s


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
