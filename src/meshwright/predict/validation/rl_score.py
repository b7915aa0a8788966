"""Published steps of reinforcement learning beside ours.

A row says what was run and what it took. What no row tells is assumed for all alike: how lengths
spread around their mean, and how long prompts are.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.rollout import Placement
from meshwright.predict.rl.rl_framework import FRAMEWORKS
from meshwright.predict.rl.rl_metrics import RLMetrics, predict_rl
from meshwright.predict.rl.rl_setup import RLSetup, RolloutBatch
from meshwright.predict.rl.weight_sync import predict_weight_sync
from meshwright.predict.rl.weight_transfer_time import WeightTransferTime
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.cost.serving_engine import VLLM
from meshwright.predict.serving.sim.serving_fleet import ReplicaPool, default_scheduler_config
from meshwright.spec.job_spec import read_cluster, read_model
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import Recompute
from meshwright.spec.workload import FixedLength, LogNormalLength

LENGTH_SIGMA = 0.6
"""Spread of the logarithm of answers' lengths, before they are cut."""
PROMPT_TOKENS = 112
"""Tokens of a prompt: what throughput, step and GPUs of NeMo-RL's rows leave beside the answers, in
the middle of them (tokens/s · s · GPUs / samples - the mean length they tell)."""
LOGPROB_PASSES = 2
"""Log-probabilities of the policy and of a reference model."""
_ONE_BY_ONE = {"max_num_seqs": 128, "max_num_batched_tokens": 2048}
"""vLLM's defaults for an engine that is neither its server nor its offline class (`SchedulerConfig`
of 0.10 to 0.17), which is how NeMo-RL makes asynchronous ones."""


class PublishedRLRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published run."""

    name: str
    source: str
    not_comparable: str = ""
    """Why ours cannot be held against it; empty where it can."""
    assumed: str = ""
    """What the source does not tell and this row takes for granted."""
    against: str = ""
    """The synchronous run that it is to be faster than."""
    model: str = ""
    cluster: str = "h100-superpod"
    gpus: int = 0
    placement: Placement = "colocated"
    rollout_gpus: int | None = None
    prompts: int = 0
    samples: int = 0
    mean_tokens: float = 0.0
    """Of an answer."""
    longest_tokens: int = 0
    """Of an answer with its prompt."""
    updates: int = 1
    engine_tp: int = 1
    memory_share: float | None = None
    """Of a GPU, for the engine; None is the engine's own default."""
    async_engine: bool | None = None
    """Requests come to engines one by one; None takes it that they do where both sides work at the
    same time."""
    trainer: dict[str, int] = {}
    """Degrees of the trainer's layout; the others are one."""
    stage_layers: tuple[int, ...] | None = None
    """Of each stage; None splits evenly, with less for the last ones where that is not possible."""
    recompute: Recompute | None = None
    """What the trainer computes again, in all layers; None is nothing."""
    forward_samples: int = 1
    """Longest samples that a microbatch of passes without gradients has room for."""
    framework: Literal["meshwright", "nemo-rl", "nemo-rl-0.4"] = "nemo-rl"
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    sync_s: float | None = None
    """Seconds of a sync; where no step is told, it alone is held against ours."""


class ScoredRLRun(msgspec.Struct, frozen=True, kw_only=True):
    """A row beside ours."""

    row: PublishedRLRun
    metrics: RLMetrics | None = None
    sync: WeightTransferTime | None = None
    """What our own plan would take, where a sync alone is told."""
    skipped: str = ""
    """Why there is no outcome."""

    @property
    def error(self) -> float | None:
        """Our step over theirs, less one."""
        if self.metrics is None or self.row.step_s is None:
            return None
        return self.metrics.step_s / self.row.step_s - 1

    @property
    def sync_error(self) -> float | None:
        """Our sync over theirs, less one."""
        if self.sync is None or self.row.sync_s is None:
            return None
        return self.sync.seconds / self.row.sync_s - 1


def read_rl_runs(path: Path) -> list[PublishedRLRun]:
    """Read published runs."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[PublishedRLRun])
    except (OSError, msgspec.DecodeError) as error:
        fix = "give a JSON list of runs; mw validate rl --help says which fields"
        raise InputError([Problem(str(path), str(error), fix)]) from None


def score_rl_run(row: PublishedRLRun) -> ScoredRLRun:
    """Predict one row, where it can be held against a prediction."""
    if row.not_comparable:
        return ScoredRLRun(row=row, skipped=row.not_comparable)
    try:
        if row.step_s is None:
            return ScoredRLRun(row=row, sync=predict_weight_sync(build_sync_setup(row)))
        return ScoredRLRun(row=row, metrics=predict_rl(build_setup(row)))
    except InputError as error:
        return ScoredRLRun(row=row, skipped=error.problems[0].what)


def build_sync_setup(row: PublishedRLRun) -> RLSetup:
    """Return what a row sent weights between, by our plan."""
    engines, training = _engines(row)
    return RLSetup(
        model=engines.replica.model,
        cluster=engines.replica.cluster,
        placement=row.placement,
        rollout_pool=engines,
        trainer_layout=_layout(row, training),
    )


def _engines(row: PublishedRLRun) -> tuple[ReplicaPool, int]:
    """Return the engines of a row, and how many GPUs train."""
    model = read_model(row.model, "model")
    cluster = read_cluster(row.cluster, "cluster").with_gpus(row.gpus)
    engine = VLLM
    if row.memory_share is not None:
        engine = msgspec.structs.replace(VLLM, gpu_memory_utilization=row.memory_share)
    replica = Replica(model=model, cluster=cluster, layout=Layout(tp=row.engine_tp), engine=engine)
    rollout = row.gpus if row.rollout_gpus is None else row.rollout_gpus
    training = row.gpus if row.rollout_gpus is None else row.gpus - rollout
    one_by_one = row.placement == "async" if row.async_engine is None else row.async_engine
    limits = default_scheduler_config(replica, **(_ONE_BY_ONE if one_by_one else {}))
    return ReplicaPool(
        replica=replica, scheduler_config=limits, count=rollout // row.engine_tp
    ), training


def _layout(row: PublishedRLRun, gpus: int) -> Layout:
    """Return how a row's trainer lies: Megatron's distributed optimizer, experts cut by no tp."""
    degrees = dict[str, Any]({"expert_tp": 1, **row.trainer})
    stages: int = degrees.get("pp", 1)
    one = degrees.get("tp", 1) * degrees.get("cp", 1) * stages
    each, more = divmod(read_model(row.model, "model").layers, stages)
    uneven = tuple(each + (at < more) for at in range(stages)) if more else None
    return Layout(
        **degrees,
        dp=gpus // one,
        zero=1,
        sequence_parallel=degrees.get("tp", 1) > 1,
        stage_layers=row.stage_layers or uneven,
        recompute=row.recompute or "none",
    )


def build_setup(row: PublishedRLRun) -> RLSetup:
    """Return what a row ran."""
    engines, training = _engines(row)
    cut = row.longest_tokens - PROMPT_TOKENS
    rounds = RolloutBatch(
        prompts_per_step=row.prompts,
        prompt_lengths=FixedLength(tokens=PROMPT_TOKENS),
        group_size=row.samples,
        response_lengths=fit_truncated_lengths(row.mean_tokens, cut),
        max_response_tokens=cut,
        microbatch_tokens=row.longest_tokens,
        logprob_microbatch_tokens=row.forward_samples * row.longest_tokens,
        updates_per_step=row.updates,
        logprob_passes=LOGPROB_PASSES,
    )
    return RLSetup(
        model=engines.replica.model,
        cluster=engines.replica.cluster,
        placement=row.placement,
        rollout_pool=engines,
        trainer_layout=_layout(row, training),
        rollout_batch=rounds,
        framework=FRAMEWORKS[row.framework],
        measured_steps=2,
    )


def fit_truncated_lengths(mean: float, longest: int) -> LogNormalLength:
    """Return lengths with a mean, after those above `longest` are cut."""
    if not 1 <= mean < longest:
        what = f"a mean of {mean:,.0f} tokens is not below the longest, {longest:,}"
        raise InputError([Problem("mean_tokens", what, "use a shorter mean")])
    low, high = 1.0, 100.0 * longest
    for _ in range(60):
        middle = (low * high) ** 0.5
        found = LogNormalLength(median=middle, sigma=LENGTH_SIGMA, longest=longest)
        low, high = (middle, high) if found.mean() < mean else (low, middle)
    return LogNormalLength(median=low, sigma=LENGTH_SIGMA, longest=longest)
