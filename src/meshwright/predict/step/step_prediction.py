"""One training step in closed form: fast enough for a search, and split by cause.

    step = passes of the slowest rank + bubble + exposed transfers and exchanges + optimizer

Exposed transfers are those between stages and those to and from host memory.

The event simulation executes the same stages under the schedule itself; this is its quick twin.
"""

import msgspec

from meshwright.predict.step.grad_buckets import overlaps_grad_reduce, predict_exposed_dp_comm
from meshwright.predict.step.measured_costs import collective_time_s
from meshwright.predict.step.offload_time import offload_waits
from meshwright.predict.step.optimizer_step import _dense, _gradient_bytes, update_phases
from meshwright.predict.step.pass_time import NO_WAITS, PassWaits
from meshwright.predict.step.pipeline_bubble import (
    has_multiple_chunks,
    mean_per_microbatch,
    predict_bubble,
    sum_rank_times,
)
from meshwright.predict.step.prediction_interval import predict_interval
from meshwright.predict.step.stage_time import ChunkTime, StageTime, chunk_times
from meshwright.predict.training_run.lora_shapes import count_trained_parameters
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import (
    RankParameters,
    count_rank_parameters,
    list_chunks,
    list_chunks_by_rank,
)
from meshwright.spec.workload import training_flops


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
    offload_s: float
    """Exposed transfers to and from host memory."""
    bubble_s: float
    """Waiting for other pipeline stages."""
    optimizer_s: float
    """Gradient norm and update."""
    tokens_per_s: float
    """Tokens of the whole job per second."""
    mfu: float
    """Useful FLOPs, exactly counted, over the peak of the layout's precision; gradients of frozen
    weights are not among them."""


def predict_step(run: TrainingRun) -> StepPrediction:
    """Predict one training step in closed form."""
    layout, count = run.layout, run.num_microbatches
    times = chunk_times(run)
    stages, parameters = sum_rank_times(run, times), count_rank_parameters(layout, run.model)
    trained = count_trained_parameters(run) if run.frozen else parameters
    waits = predict_pass_waits(run, times, stages, parameters, trained)
    pipe = predict_bubble(run, times, waits)
    stage = mean_per_microbatch(run, stages[pipe.busiest_rank])
    waited_dp, waited_offload = _waited(run, waits, pipe.busiest_rank)
    # Passes side by side hide exchange that they would wait for one by one.
    apart = count * stage.total_s + waited_dp + waited_offload
    hidden = min(max(0.0, apart - pipe.busy_s), count * stage.ep_s)
    bubble = max(0.0, pipe.end_s - (apart - hidden) - pipe.transfers_s)
    update = update_phases(run, stages, trained)
    around = predict_exposed_dp_comm(run, trained, update.totals_s, pipe)
    exchange = waited_dp + around.dp_comm_s
    moving = around.optimizer_s * update.transfer_share
    offload, updating = waited_offload + moving, around.optimizer_s - moving
    passes = count * stage.total_s - hidden
    step_s = passes + bubble + pipe.transfers_s + exchange + offload + updating
    exposed = count * (stage.tp_s + stage.cp_s) + pipe.transfers_s + exchange + offload
    if "optimizer" in layout.offload:
        exposed += updating
    low_s, high_s = predict_interval(run, step_s, exposed)
    tokens = run.global_batch * run.sequence_length
    flops = training_flops(run.model, run.sequence_length, run.adapter) * tokens
    peak = run.cluster.gpu.peak_flops(layout.precision) * layout.gpus
    return StepPrediction(
        step_s=step_s,
        low_s=low_s,
        high_s=high_s,
        compute_s=count * stage.compute_s,
        recompute_s=count * stage.recompute_s,
        tp_s=count * stage.tp_s,
        cp_s=count * stage.cp_s,
        ep_s=count * stage.ep_s - hidden,
        pp_s=pipe.transfers_s,
        dp_s=exchange,
        offload_s=offload,
        bubble_s=bubble,
        optimizer_s=updating,
        tokens_per_s=tokens / step_s,
        mfu=flops / (peak * step_s),
    )


def _waited(run: TrainingRun, waits: tuple[PassWaits, ...], rank: int) -> tuple[float, float]:
    """Return how long the passes of a rank wait for exchange and for host memory in all."""
    if waits[0] is NO_WAITS:
        return 0.0, 0.0
    count = float(run.num_microbatches)
    own: tuple[PassWaits, ...] = (waits[rank],)
    if has_multiple_chunks(run):
        held = list_chunks_by_rank(run.layout, run.model.layers)[rank]
        own = tuple(waits[chunk.position] for chunk in held)
        # Of DualPipe's two chunks, each sees half of the microbatches.
        count /= len(held) // run.layout.virtual_stages
    last = min(1.0, count)
    exchange = offload = 0.0
    for one in own:
        exchange += (
            count * one.forward_dp_s
            + (count - last) * one.backward_dp_s
            + last * one.last_backward_dp_s
        )
        offload += count * (one.forward_offload_s + one.backward_offload_s)
    return exchange, offload


def predict_pass_waits(
    run: TrainingRun,
    times: tuple[ChunkTime, ...],
    stages: tuple[StageTime, ...],
    parameters: tuple[RankParameters, ...],
    trained: tuple[RankParameters, ...],
) -> tuple[PassWaits, ...]:
    """Return, by chunk, what passes wait for beside their own communication.

    `stages`, `parameters` and what is `trained` of these are those of every rank.
    """
    layout = run.layout
    waits: tuple[PassWaits, ...] = (NO_WAITS,) * len(times)
    scatters = layout.zero == 3 or (layout.zero == 2 and run.num_microbatches > 1)
    if scatters and layout.dp * layout.cp > 1:
        ranks = list(zip(stages, parameters, trained, strict=True))
        each = {one: zero3_wait_share(run, *one) for one in set(ranks)}  # most are alike
        shares = [each[one] for one in ranks]
        if has_multiple_chunks(run):
            # A chunk that two ranks hold (DualPipe) is held beside the same other one by both.
            rank = {chunk.position: chunk.rank for chunk in list_chunks(layout, run.model.layers)}
            shares = [shares[rank[position]] for position in range(len(times))]
        waits = tuple(_sharded(run, *one) for one in zip(times, shares, strict=True))
    return offload_waits(run, times, waits) if layout.offload else waits


def zero3_wait_share(
    run: TrainingRun, stage: StageTime, held: RankParameters, trained: RankParameters | None = None
) -> float:
    """Return how long passes wait for sharded states per second they run.

    ZeRO 2 shards no parameters, so that only its backwards wait.
    """
    over = stage.backward_s if run.layout.zero == 2 else stage.total_s
    return zero3_comm_s(run, stage, held, trained) / over


def _sharded(run: TrainingRun, time: ChunkTime, share: float) -> PassWaits:
    """Return the waits of one chunk's passes for sharded states.

    The gradients of ZeRO 2's last microbatch are reduced as those of ZeRO 1, see `buckets`.
    """
    forward, backward = share * time.total.forward_s, share * time.total.backward_s
    if run.layout.zero == 2:
        return PassWaits(backward_dp_s=backward)
    return PassWaits(forward, backward, backward)


def zero3_comm_s(
    run: TrainingRun, stage: StageTime, held: RankParameters, trained: RankParameters | None = None
) -> float:
    """Return the exposed gathers and scatters of sharded states per microbatch.

    Fully sharded parameters are gathered for both passes; gradients that are kept in shards are
    scattered in every backward. `trained` is what has gradients, all that is held where it is None.
    """
    layout, software = run.layout, run.framework
    if layout.dp * layout.cp == 1:
        return 0.0
    layers = max(1, run.model.layers // layout.pp)
    gather_s, scatter_s = layer_zero3_comm_s(run, held, layers, trained)
    early = software.prefetch_sharded_params and layout.overlap_parameters
    behind = software.prefetch_sharded_params and layout.overlap_gradients
    if layout.zero == 2:
        early, behind = False, overlaps_grad_reduce(run)
    forward = stage.forward_s / layers if early else 0.0
    backward = stage.backward_s / layers
    late = max(0.0, gather_s - forward)
    late += max(0.0, early * gather_s + behind * scatter_s - backward)
    late += (not early) * gather_s + (not behind) * scatter_s
    hidden = run.constants.comm_sm_share * (gather_s + gather_s + scatter_s - late)
    return layers * (late + hidden) + early * gather_s + behind * scatter_s


def layer_zero3_comm_s(
    run: TrainingRun, held: RankParameters, layers: int, trained: RankParameters | None = None
) -> tuple[float, float]:
    """Return how long one layer's parameters are gathered and its gradients scattered."""
    layout = run.layout
    graded = trained or held
    parts = [("dp-cp" if layout.shard is None else "shard", _dense(held), _dense(graded))]
    if held.experts and layout.expert_dp > 1:
        parts.append(("expert_dp", held.experts, graded.experts))
    gather_s = scatter_s = 0.0
    for axes, parameters, gradients in parts:
        if layout.zero == 3:
            size = run.element_bytes * (parameters / layers)
            gather_s += collective_time_s(run, axes, "all_gather", size)
        if gradients:
            size = _gradient_bytes(run) * (gradients / layers)
            scatter_s += collective_time_s(run, axes, "reduce_scatter", size)
            if run.measured is not None:
                scatter_s += run.measured.bucket_copy.predict_s(size)
    return gather_s, scatter_s
