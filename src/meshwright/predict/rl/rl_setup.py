"""`RLSetup`: a model that learns from what it generates, and the GPUs of both sides."""

from random import Random
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.rollout import Placement, RolloutPolicy, StalePolicy, build_rollout_policy
from meshwright.predict.rl.rl_framework import MESHWRIGHT, RLFramework
from meshwright.predict.serving.sim.serving_fleet import ReplicaPool
from meshwright.predict.training_run.training_framework import MEGATRON, TrainingFramework
from meshwright.spec.cluster import Cluster
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.units import format_quantity
from meshwright.spec.workload import FixedLength, Lengths, LoRASpec

DEFAULT_MEASURED_STEPS = 16
"""Steps that are measured, where nobody says: asynchronous ones are long and short by turns, and
the longest answer of each decides many."""


class GroupLengths(NamedTuple):
    """Lengths of one group."""

    prompt_tokens: int
    response_tokens: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens that are trained on, prompts included."""
        return len(self.response_tokens) * self.prompt_tokens + sum(self.response_tokens)

    @property
    def squared_length(self) -> int:
        """Sum of the squared lengths, which attention grows with."""
        return sum((self.prompt_tokens + answer) ** 2 for answer in self.response_tokens)


class RolloutBatch(msgspec.Struct, frozen=True, kw_only=True):
    """What every step asks for."""

    prompts_per_step: int = 128
    """Groups of a step."""
    group_size: int = 16
    """Answers to each prompt."""
    prompt_lengths: Lengths = FixedLength(tokens=256)
    response_lengths: Lengths = FixedLength(tokens=1024)
    max_response_tokens: int = 32768
    """Answers are cut there."""
    microbatch_tokens: int | None = None
    """Tokens of a training microbatch, which samples are packed into; None takes the longest
    sample of a step."""
    logprob_microbatch_tokens: int | None = None
    """The same of passes without gradients; None takes as many."""
    updates_per_step: int = 1
    """Updates of the weights in one step: minibatches."""
    logprob_passes: int = 1
    """Passes without gradients over what is trained on: 1 for log-probabilities of the policy, 2
    with those of a reference model."""
    reference: bool | None = None
    """Whether there is such a model; None takes it that there is where
    `logprob_passes` is 2 or more."""
    adapter: LoRASpec | None = None
    """What is trained beside frozen weights; None trains every weight. The reference model is the
    policy without it then."""
    seed: int = 0

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(
            prompts_per_step=self.prompts_per_step, group_size=self.group_size,
            max_response_tokens=self.max_response_tokens, updates_per_step=self.updates_per_step,
            microbatch_tokens=self.microbatch_tokens,
            logprob_microbatch_tokens=self.logprob_microbatch_tokens,
        )  # fmt: skip
        bounds.count(0, logprob_passes=self.logprob_passes, seed=self.seed)
        bounds.raise_problems()

    @property
    def has_reference(self) -> bool:
        """Whether a reference model lies somewhere."""
        if self.adapter is not None:
            return False
        return self.logprob_passes > 1 if self.reference is None else self.reference

    def sample_group(self, group: int) -> GroupLengths:
        """Return the lengths of a group, the same ones whoever asks and whenever."""
        rng = Random(self.seed * 1_000_003 + group)
        (prompt,) = self.prompt_lengths.sample(rng, 1)
        answers = self.response_lengths.sample(rng, self.group_size)
        return GroupLengths(
            max(1, prompt), tuple(min(max(1, one), self.max_response_tokens) for one in answers)
        )

    def with_mean_lengths(self) -> "RolloutBatch":
        """Return the same with answers that are all as long as the mean one."""
        drawn = [
            one
            for group in range(self.prompts_per_step)
            for one in self.sample_group(group).response_tokens
        ]
        mean = max(1, round(sum(drawn) / len(drawn)))
        return msgspec.structs.replace(self, response_lengths=FixedLength(tokens=mean))


class RLSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Both sides, and how they go together."""

    model: Model
    cluster: Cluster
    placement: Placement
    rollout_pool: ReplicaPool
    trainer_layout: Layout
    rollout_batch: RolloutBatch = RolloutBatch()
    max_staleness: int | None = None
    """Of `async`; the others have their own."""
    stale_policy: StalePolicy = "wait"
    """What becomes of groups that fall behind, where steps take what has ended."""
    max_running_groups: int | None = None
    """Groups under way at most; None leaves it to the engines, where those that wait grow old."""
    shares_gpus_concurrently: bool = False
    """Of `disaggregated`: both sides lie on the same GPUs, with memory of their own, and work one
    after the other."""
    shares_trainer_weights: bool = False
    """Engines on the trainer's GPUs use its weights where they lie, beside an adapter."""
    trainer_framework: TrainingFramework = MEGATRON
    """What trains."""
    framework: RLFramework = MESHWRIGHT
    """What puts both sides together."""
    measured_steps: int = DEFAULT_MEASURED_STEPS
    """Steps that are measured, after those in which the pipeline fills and settles, and before
    those that drain it."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(measured_steps=self.measured_steps)
        bounds.raise_problems()
        if self.shares_gpus_concurrently and self.placement != "disaggregated":
            what = f"{self.placement} with both sides beside each other is not simulated"
            raise InputError(
                [Problem("shares_gpus_concurrently", what, "give both sides GPUs of their own")]
            )
        if self.rollout_batch.adapter is not None and self.framework.sync_method == "gathered":
            what = f"how {self.framework.name} sends adapters is not known"
            raise InputError([Problem("adapter", what, "leave it out")])
        terms = self.rollout_policy
        if self.stale_policy != "wait" and (
            terms.consume_order == "submitted" or not terms.max_staleness
        ):
            what = f"with {self.placement} no group gets too old: steps take them in their order"
            fix = "leave out `stale_policy`, or use placement=async"
            if terms.consume_order == "completed":
                what = "with a staleness of 0 every step waits for its own groups"
                fix = "leave out `stale_policy`, or use max_staleness=1"
            raise InputError([Problem("stale_policy", what, fix)])
        taken = self.rollout_pool.gpus, self.trainer_layout.gpus
        if self.shares_gpus and taken[0] != taken[1]:
            what = f"engines have {taken[0]} GPUs and the trainer {taken[1]}, which are the same"
            raise InputError([Problem("placement", what, "let both have as many")])
        if self.gpus > self.cluster.gpus:
            needed = format_quantity(self.gpus, "GPU is needed", "GPUs are needed")
            what = f"{needed}, {self.cluster.name} has {self.cluster.gpus}"
            raise InputError([Problem("cluster", what, "use fewer, or a larger one")])

    @property
    def rollout_policy(self) -> RolloutPolicy:
        """What the controller goes by: enough steps to fill, settle, measure and drain."""
        found = build_rollout_policy(
            self.placement,
            groups=self.rollout_batch.prompts_per_step,
            steps=1,
            max_staleness=self.max_staleness,
            on_stale=self.stale_policy,
            max_concurrent_groups=self.max_running_groups,
        )
        ahead = found.max_staleness + 1
        # What was begun at once in the beginning goes on ending at once for another round.
        settles = ahead if found.max_staleness else 0
        return msgspec.structs.replace(found, total_steps=self.measured_steps + 2 * ahead + settles)

    @property
    def shares_gpus(self) -> bool:
        """Whether both sides have the same GPUs."""
        return self.rollout_policy.colocated or self.shares_gpus_concurrently

    @property
    def gpus(self) -> int:
        """GPUs of both sides; those that they share count once."""
        return self.trainer_layout.gpus + (0 if self.shares_gpus else self.rollout_pool.gpus)


def take_gpu_share(cluster: Cluster, gpus: int) -> Cluster:
    """Return so many GPUs of a cluster as one of their own: whole nodes, or a part of one."""
    node = cluster.gpus_per_node
    if gpus % node == 0:
        return cluster.with_gpus(gpus)
    if gpus > node:
        what, fix = f"{gpus} GPUs are no whole nodes of {node}", f"use a multiple of {node}"
        raise InputError([Problem("gpus", what, fix)])
    replace = msgspec.structs.replace
    linked = replace(cluster.scale_up, gpus=min(cluster.scale_up.gpus, gpus))
    return replace(cluster, nodes=1, gpus_per_node=gpus, scale_up=linked)
