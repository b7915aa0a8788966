"""`RLMetrics`: what a simulated run of reinforcement learning amounts to."""

import msgspec
import numpy as np

from meshwright.predict.rl.microbatch_packing import pack_update
from meshwright.predict.rl.rl_setup import RLSetup
from meshwright.predict.rl.rl_simulation import RLSpan, SimulatedRL, simulate_rl


class RLMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one step, over the steps that were measured."""

    steps: int
    """Steps that were measured."""
    step_s: float
    """From the end of one to the end of the next."""
    tokens: float
    """Tokens of a step, prompts included."""
    tokens_per_s_per_gpu: float
    training_s: float
    """Passes without gradients, and what comes from the host for them, among it."""
    forward_s: float
    """Of that, passes without gradients."""
    swap_s: float
    """Of that, weights and states on their way between host and GPU."""
    sync_s: float
    memory_phases_s: float
    """Moves of memory, where both sides share GPUs."""
    waits_s: dict[str, dict[str, float]]
    """Of the trainer and of all engines at once, by the name of the wait."""
    engine_utilization: float
    """Share of the time in which engines compute, over all of them."""
    mean_decode_batch: float
    """Mean number of sequences that an engine decodes at once, while it decodes."""
    bubble: float
    """Share of all GPU-seconds in which a GPU's side does nothing at all."""
    mean_staleness: float
    """Mean of the groups that were trained on."""
    max_staleness: int
    dropped_groups: float
    """Groups of a step that were let go as too old."""
    gpus: int
    rollout_gpus: int
    training_gpus: int
    training_mfu: float
    """Of the passes with gradients alone, while the trainer trains."""
    peak_bytes: dict[str, float]
    equal_length_step_s: float | None = None
    """The step, were all answers as long as the mean one; None where it was not looked at."""

    @property
    def length_skew_slowdown(self) -> float | None:
        """How much longer a step is than with answers of equal length, as a share."""
        return (
            None if self.equal_length_step_s is None else self.step_s / self.equal_length_step_s - 1
        )


def predict_rl(setup: RLSetup, *, even: bool = True) -> RLMetrics:
    """Simulate a setup; with `even`, also with answers that are all as long as the mean one."""
    found = compute_rl_metrics(simulate_rl(setup))
    if not even:
        return found
    # Microbatches stay as large as they were: what is compared is who waits for whom.
    room = (
        setup.rollout_batch.microbatch_tokens
        or pack_update(setup.rollout_batch).max_microbatch_tokens
    )
    even_rounds = msgspec.structs.replace(
        setup.rollout_batch.with_mean_lengths(), microbatch_tokens=room
    )
    flat = msgspec.structs.replace(setup, rollout_batch=even_rounds)
    # Nobody runs that one: other samples fill microbatches otherwise, and need not fit.
    other = compute_rl_metrics(simulate_rl(flat, must_fit=False))
    # The mean of one step's draw and that of the others differ a little.
    scaled = other.step_s * found.tokens / other.tokens
    return msgspec.structs.replace(found, equal_length_step_s=scaled)


def compute_rl_metrics(run: SimulatedRL) -> RLMetrics:
    """Return the figures of a run, without the steps in which it fills, settles and drains."""
    setup = run.setup
    # What engines generate ahead fills the first steps and is missing in the last ones.
    last = len(run.steps) - 2 - setup.rollout_policy.max_staleness
    first = last - setup.measured_steps
    start, end = run.steps[first].end_s, run.steps[last].end_s
    steps = run.steps[first + 1 : last + 1]
    count = len(steps)
    seconds = (end - start) / count
    waits: dict[str, dict[str, float]] = {"trainer": {}, "engines": {}}
    for span in run.wait_spans:
        inside = _inside(span, start, end) / count
        if inside > 0:
            of = waits[span.actor]
            of[span.name] = of.get(span.name, 0.0) + inside
    doings: dict[str, float] = {}
    for span in run.trainer_spans:
        doings[span.name] = doings.get(span.name, 0.0) + _inside(span, start, end) / count
    training, synced = doings.pop("train", 0.0), doings.pop("sync", 0.0)
    busy, decoding = _engines(run, start, end)
    tokens = sum(one.tokens for one in steps) / count
    stale = [one for step in steps for one in step.staleness]
    rollout, trainer = setup.rollout_pool.gpus, setup.trainer_layout.gpus
    phases = sum(doings.values())
    at_work = rollout * busy + trainer * (training + synced + phases) / seconds
    priced = run.trainer_costs
    useful = priced.step.mfu * priced.step.step_s * tokens / priced.padded_tokens
    return RLMetrics(
        steps=count,
        step_s=seconds,
        tokens=tokens,
        tokens_per_s_per_gpu=tokens / seconds / setup.gpus,
        training_s=training,
        forward_s=priced.forward_s * tokens / (priced.updates * priced.tokens),
        swap_s=priced.swap_s,
        sync_s=synced,
        memory_phases_s=phases,
        waits_s=waits,
        engine_utilization=busy,
        mean_decode_batch=decoding,
        bubble=max(0.0, 1 - at_work / setup.gpus),
        mean_staleness=sum(stale) / len(stale),
        max_staleness=max(stale),
        dropped_groups=sum(start < at <= end for at in run.dropped_at_s) / count,
        gpus=setup.gpus,
        rollout_gpus=rollout,
        training_gpus=trainer,
        training_mfu=useful / training,
        peak_bytes=priced.peak_bytes,
    )


def _inside(span: RLSpan, start: float, end: float) -> float:
    return max(0.0, min(span.end_s, end) - max(span.start_s, start))


def _engines(run: SimulatedRL, start: float, end: float) -> tuple[float, float]:
    """Return the share of time in which engines compute, and how many they decode at once."""
    busy = decoded = decoding_s = 0.0
    for did in run.engine_runs:
        lasts = np.clip(np.minimum(did.end_s, end) - np.maximum(did.start_s, start), 0.0, None)
        busy += float(lasts.sum())
        decoded += float((lasts * did.decodes).sum())
        decoding_s += float(lasts[did.decodes > 0].sum())
    share = busy / ((end - start) * len(run.engine_runs))
    return share, decoded / decoding_s if decoding_s else 0.0
