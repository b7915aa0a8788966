"""One training step in closed form: fast enough for a search, and split by cause.

    step = passes of the slowest rank + bubble + exposed transfers and exchanges + optimizer

Exposed transfers are those between stages and those to and from host memory.

The event simulation executes the same stages under the schedule itself; this is its quick twin.
"""

from operator import add, itemgetter
from typing import NamedTuple

import msgspec

from meshwright.predict.adapters import trained_parameters
from meshwright.predict.bubble import hold_several, per_microbatch, pipeline, rank_times
from meshwright.predict.buckets import around_passes, reductions_overlap
from meshwright.predict.cost import memory_s, optimizer_s
from meshwright.predict.interval import bounds
from meshwright.predict.measured import exchange_s
from meshwright.predict.offload import host_update_s, offload_waits, update_waits
from meshwright.predict.pass_time import NO_WAITS, Waits
from meshwright.predict.run import Run
from meshwright.predict.stage_time import ChunkTime, StageTime, chunk_times
from meshwright.spec.layout import RankParameters, chunks, rank_chunks, rank_parameters
from meshwright.spec.layout.states import MOMENTS, STATE_BYTES
from meshwright.spec.workload import trained_flops


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


def predict_step(run: Run) -> StepPrediction:
    """Predict one training step in closed form."""
    layout, count = run.layout, run.microbatches
    times = chunk_times(run)
    stages, parameters = rank_times(run, times), rank_parameters(layout, run.model)
    trained = trained_parameters(run) if run.frozen else parameters
    waits = pass_waits(run, times, stages, parameters, trained)
    pipe = pipeline(run, times, waits)
    stage = per_microbatch(run, stages[pipe.busiest])
    waited_dp, waited_offload = _waited(run, waits, pipe.busiest)
    # Passes side by side hide exchange that they would wait for one by one.
    apart = count * stage.total + waited_dp + waited_offload
    hidden = min(max(0.0, apart - pipe.busy_s), count * stage.ep)
    bubble = max(0.0, pipe.end_s - (apart - hidden) - pipe.transfers_s)
    update = update_phases(run, stages, trained)
    around = around_passes(run, trained, update.wholes, pipe)
    exchange = waited_dp + around.exchange_s
    moving = around.update_s * update.share_moving
    offload, updating = waited_offload + moving, around.update_s - moving
    passes = count * stage.total - hidden
    step_s = passes + bubble + pipe.transfers_s + exchange + offload + updating
    exposed = count * (stage.tp + stage.cp) + pipe.transfers_s + exchange + offload
    if "optimizer" in layout.offload:
        exposed += updating
    low_s, high_s = bounds(run, step_s, exposed)
    tokens = run.batch * run.length
    flops = trained_flops(run.model, run.length, run.adapter) * tokens
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
        offload_s=offload,
        bubble_s=bubble,
        optimizer_s=updating,
        tokens_per_s=tokens / step_s,
        mfu=flops / (peak * step_s),
    )


def _waited(run: Run, waits: tuple[Waits, ...], rank: int) -> tuple[float, float]:
    """Return how long the passes of a rank wait for exchange and for host memory in all."""
    if waits[0] is NO_WAITS:
        return 0.0, 0.0
    count = float(run.microbatches)
    own: tuple[Waits, ...] = (waits[rank],)
    if hold_several(run):
        held = rank_chunks(run.layout, run.model.layers)[rank]
        own = tuple(waits[chunk.position] for chunk in held)
        # Of DualPipe's two chunks, each sees half of the microbatches.
        count /= len(held) // run.layout.virtual_stages
    last = min(1.0, count)
    exchange = offload = 0.0
    for one in own:
        exchange += count * one.forward_dp + (count - last) * one.backward_dp + last * one.last_dp
        offload += count * (one.forward_offload + one.backward_offload)
    return exchange, offload


def _gradient_bytes(run: Run) -> float:
    return float(STATE_BYTES[run.layout.gradient_precision])


def pass_waits(
    run: Run,
    times: tuple[ChunkTime, ...],
    stages: tuple[StageTime, ...],
    parameters: tuple[RankParameters, ...],
    trained: tuple[RankParameters, ...],
) -> tuple[Waits, ...]:
    """Return, by chunk, what passes wait for beside their own communication.

    `stages`, `parameters` and what is `trained` of these are those of every rank.
    """
    layout = run.layout
    waits: tuple[Waits, ...] = (NO_WAITS,) * len(times)
    scatters = layout.zero == 3 or (layout.zero == 2 and run.microbatches > 1)
    if scatters and layout.dp * layout.cp > 1:
        ranks = list(zip(stages, parameters, trained, strict=True))
        each = {one: sharded_share(run, *one) for one in set(ranks)}  # most are alike
        shares = [each[one] for one in ranks]
        if hold_several(run):
            # A chunk that two ranks hold (DualPipe) is held beside the same other one by both.
            rank = {chunk.position: chunk.rank for chunk in chunks(layout, run.model.layers)}
            shares = [shares[rank[position]] for position in range(len(times))]
        waits = tuple(_sharded(run, *one) for one in zip(times, shares, strict=True))
    return offload_waits(run, times, waits) if layout.offload else waits


def sharded_share(
    run: Run, stage: StageTime, held: RankParameters, trained: RankParameters | None = None
) -> float:
    """Return how long passes wait for sharded states per second they run.

    ZeRO 2 shards no parameters, so that only its backwards wait.
    """
    over = stage.backward if run.layout.zero == 2 else stage.total
    return sharded_exchange(run, stage, held, trained) / over


def _sharded(run: Run, time: ChunkTime, share: float) -> Waits:
    """Return the waits of one chunk's passes for sharded states.

    The gradients of ZeRO 2's last microbatch are reduced as those of ZeRO 1, see `buckets`.
    """
    forward, backward = share * time.whole.forward, share * time.whole.backward
    if run.layout.zero == 2:
        return Waits(backward_dp=backward)
    return Waits(forward, backward, backward)


def sharded_exchange(
    run: Run, stage: StageTime, held: RankParameters, trained: RankParameters | None = None
) -> float:
    """Return the exposed gathers and scatters of sharded states per microbatch.

    Fully sharded parameters are gathered for both passes; gradients that are kept in shards are
    scattered in every backward. `trained` is what has gradients, all that is held where it is None.
    """
    layout, software = run.layout, run.software
    if layout.dp * layout.cp == 1:
        return 0.0
    layers = max(1, run.model.layers // layout.pp)
    gather_s, scatter_s = layer_exchange(run, held, layers, trained)
    early = software.overlap_sharded and layout.overlap_parameters
    behind = software.overlap_sharded and layout.overlap_gradients
    if layout.zero == 2:
        early, behind = False, reductions_overlap(run)
    forward = stage.forward / layers if early else 0.0
    backward = stage.backward / layers
    late = max(0.0, gather_s - forward)
    late += max(0.0, early * gather_s + behind * scatter_s - backward)
    late += (not early) * gather_s + (not behind) * scatter_s
    hidden = run.constants.sm_share * (gather_s + gather_s + scatter_s - late)
    return layers * (late + hidden) + early * gather_s + behind * scatter_s


def layer_exchange(
    run: Run, held: RankParameters, layers: int, trained: RankParameters | None = None
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
            size = run.number_bytes * (parameters / layers)
            gather_s += exchange_s(run, axes, "all_gather", size)
        if gradients:
            size = _gradient_bytes(run) * (gradients / layers)
            scatter_s += exchange_s(run, axes, "reduce_scatter", size)
            if run.measured is not None:
                scatter_s += run.measured.collect.seconds(size)
    return gather_s, scatter_s


def _dense(held: RankParameters) -> int:
    return held.matrices + held.others


class UpdatePhases(NamedTuple):
    """What every rank does between its last backward and its next step."""

    updates: tuple[float, ...]
    """Seconds of gradient norm and update."""
    transfers: tuple[float, ...] = ()
    """Exposed seconds of transfers to and from host memory; empty where there are none."""

    @property
    def wholes(self) -> tuple[float, ...]:
        """Both."""
        if not self.transfers:
            return self.updates
        return tuple(map(add, self.updates, self.transfers))

    @property
    def share_moving(self) -> float:
        """The transfers' share on the rank that takes longest."""
        if not self.transfers:
            return 0.0
        moving, whole = max(zip(self.transfers, self.wholes, strict=True), key=itemgetter(1))
        return moving / whole if whole else 0.0


def update_phases(
    run: Run, stages: tuple[StageTime, ...], parameters: tuple[RankParameters, ...]
) -> UpdatePhases:
    """Return the update of every rank; `parameters` is what each trains."""
    each = {held: optimizer_update(run, held) for held in set(parameters)}
    updates = tuple(each[held] for held in parameters)
    if not run.layout.offload:
        return UpdatePhases(updates)
    updated = tuple(updated_parameters(run, held) for held in parameters)
    return UpdatePhases(updates, update_waits(run, stages, updated, updates))


def updated_parameters(run: Run, held: RankParameters) -> float:
    """Return how many parameters one rank updates."""
    layout = run.layout
    shard = layout.shard_degree if layout.zero else 1
    replicas = layout.dp * layout.cp // layout.shard_degree
    experts = max(1, layout.expert_dp // replicas) if layout.zero else 1
    return _dense(held) / shard + held.experts / experts


def optimizer_update(run: Run, held: RankParameters) -> float:
    """Return the update: states read and written once, and the norm of the gradients."""
    number = updated_parameters(run, held)
    if run.measured is not None:
        return run.measured.step_s + run.measured.parameter_s * number
    update_s, norm_s = update_parts(run, number)
    return update_s + norm_s


def update_parts(run: Run, number: float) -> tuple[float, float]:
    """Return the seconds of updating so many parameters, and of their gradients' norm."""
    layout = run.layout
    moments = 2 * MOMENTS[layout.optimizer] * STATE_BYTES[layout.moment_precision]
    # Weights are read and written in the format of the masters, and copied to 16 bits beside them.
    master = STATE_BYTES[layout.master_precision]
    weights = 2 * master + 2 if master else 4
    gradient = _gradient_bytes(run)
    moved = (moments + weights + gradient) * number
    away = "optimizer" in layout.offload
    update_s = host_update_s(run, moved) if away else optimizer_s(run.costs, moved)
    return update_s, memory_s(run.costs, "gradient_norm", gradient * number)
