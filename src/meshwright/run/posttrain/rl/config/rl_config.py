"""`RLConfig`: a run of reinforcement learning, as its file and the command line give it.

Whoever reads settings needs no torch.
"""

from typing import Literal, get_args

import msgspec

from meshwright.errors import InputError
from meshwright.policy.rollout.rollout_policy import (
    PLACEMENTS,
    Placement,
    RolloutPolicy,
    build_rollout_policy,
)
from meshwright.run.posttrain.lora.lora_config import AdapterConfig
from meshwright.run.posttrain.prompt_task.task_config import DIGITS, QUESTIONS, TaskConfig
from meshwright.run.posttrain.rl.config.compatibility import (
    find_adapter_problems,
    find_rl_layout_problems,
)
from meshwright.run.posttrain.rl.config.objective_config import CriticConfig, ObjectiveConfig
from meshwright.run.posttrain.rollout.verifiers.verifier_job import VerifierLimits
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.layout import Layout
from meshwright.spec.model import AttentionSpec, BlockSpec, MLPSpec, Model
from meshwright.spec.scheduler_config import SchedulerConfig

RLPrecision = Literal["fp32", "bf16"]
EngineWeightFormat = Literal["none", "fp8"]
_MOST_REQUESTS = 1024

__all__ = [
    "DIGITS",
    "QUESTIONS",
    "AdapterConfig",
    "CriticConfig",
    "ObjectiveConfig",
    "RLConfig",
    "RLEvaluationConfig",
    "TaskConfig",
    "TinyModelConfig",
    "WarmupConfig",
]


class TinyModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A small model that is trained from random weights, where no folder is given."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    ffn: int = 192
    max_positions: int = 32
    """The longest prompt with its answer."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            ffn=self.ffn,
            max_positions=self.max_positions,
        )
        if bounds.is_valid("hidden", "heads") and self.hidden % self.heads:
            what = f"{self.hidden} numbers are not shared evenly by {self.heads} heads"
            bounds.add("heads", what, "use a divisor of hidden")
        bounds.raise_problems()

    def model(self, vocab: int) -> Model:
        """Return the model for a vocabulary.

        Positions are learned: where a digit stands says more here than how far others are.
        """
        width = self.hidden // self.heads
        mixer = AttentionSpec(heads=self.heads, kv_heads=self.heads, head_dim=width, rotary=None)
        return Model(
            name="from random weights",
            hidden=self.hidden,
            vocab=vocab,
            blocks=(BlockSpec(name="plain", mixer=mixer, mlp=MLPSpec(width=self.ffn)),),
            pattern=f"{self.layers}*plain",
            positions="learned",
            max_positions=self.max_positions,
        )


class WarmupConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised steps on right answers before the first rollout, where the task shows some."""

    steps: int = 0
    answers: int = 64
    """Of one step."""
    lr: float = 1e-3

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(0, steps=self.steps)
        bounds.count(answers=self.answers)
        bounds.positive(lr=self.lr)
        bounds.raise_problems()


class RLEvaluationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out prompts: sampled as in training; greedy too at the beginning and the end."""

    num_prompts: int = 0
    """How many; 0 evaluates nothing."""
    every_steps: int | None = None
    """Steps between two evaluations; None evaluates before the first and after the last."""
    transcripts: int = 5
    """Answers to the same prompts that are written down before and after."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(0, num_prompts=self.num_prompts, transcripts=self.transcripts)
        bounds.count(every_steps=self.every_steps)
        bounds.raise_problems()


def get_default_optimizer(model: str, *, adapted: bool = False) -> OptimizerConfig:
    """Return how a run learns that says nothing of it: a model that knows something, little.

    An adapter beside one learns at ten times its rate, as in other recipes.
    """
    rate = (1e-5 if adapted else 1e-6) if model else 1e-3
    return OptimizerConfig(lr=rate, schedule="linear", warmup_steps=0, weight_decay=0.0)


class RLConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run: generate groups of answers, judge them, train, and again."""

    steps: int = 100
    prompts_per_step: int = 32
    """Groups of one step: one for each prompt."""
    group_size: int = 8
    """Answers to a prompt."""
    extra_prompts: int = 0
    """Further prompts that a step may ask where all rewards of a group are equal, so that it
    trains on groups that tell something (DAPO's dynamic sampling)."""
    max_tokens: int | None = None
    """Of one turn; None is what the task needs."""
    max_turns: int = 1
    seed: int = 0
    folder: str = ""
    """Where the run keeps its files, and goes on from; none keeps nothing."""
    task: TaskConfig = TaskConfig()
    model: str = ""
    """A Hugging Face folder; none trains `network` from random weights."""
    network: TinyModelConfig = TinyModelConfig()
    warm_up: WarmupConfig = WarmupConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    critic: CriticConfig = CriticConfig()
    """What learns values beside the policy, where `objective.adv_estimator` is gae."""
    optimizer: OptimizerConfig = get_default_optimizer("")
    """`mw train` has a rate of 1e-6 where a `model` is given and nothing is said of it, and of 1e-5
    with an adapter."""
    adapter: AdapterConfig | None = None
    """What is trained beside frozen weights, as in other recipes; None trains every weight."""
    placement: Placement = "disaggregated"
    """Whether both sides work one after the other, with memory of their own (disaggregated) or
    taking turns with it (colocated), or at the same time."""
    max_staleness: int | None = None
    """How many steps behind the trainer the weights of a group may be: 0 for disaggregated
    and colocated, 1 for one_step_off, and 1 unless said for async."""
    device: str = "auto"
    precision: RLPrecision | None = None
    """Of weights, on both sides; None is fp32 on a processor and bf16 on a GPU."""
    engine_weights: EngineWeightFormat = "none"
    """What the engine keeps matrices in: the trainer's numbers, or fp8 with a scale for each row,
    rounded anew with every version. `objective.importance_correction` corrects for it."""
    layout: Layout = Layout()
    """How the ranks of the trainer share the model, as in other training; the default is one
    device. Numbers are in the run's `precision`, microbatches of `microbatch_tokens`."""
    threads: int | None = None
    """Of torch on a processor: small models are quickest with 1. None leaves it as it is."""
    microbatch_tokens: int = 16384
    """Tokens of one forward pass of the trainer, padding included."""
    max_num_seqs: int | None = None
    """Answers that an engine writes at a time; None is all that it gets of a step, 1024 at most."""
    workers: WorkerConfig = WorkerConfig()
    """Engines that draw in processes of their own."""
    cuda_graphs: bool = True
    """Capture the engine's decoding steps in CUDA graphs."""
    max_cudagraph_capture_size: int = 0
    """Capture its steps with prompts as well, up to so many tokens: where both sides work at the
    same time, prompts come in many steps, which the host would launch kernel by kernel."""
    verifier_workers: int = 1
    verifier: VerifierLimits = VerifierLimits()
    max_pending_rewards: int = 16
    """Verdicts of one step that may fail; with more the run ends, and names the verifier."""
    environment_timeout_s: float = 60.0
    """Seconds that an environment may take for its reply to a turn; the run ends where one takes
    longer, and names it."""
    evaluate: RLEvaluationConfig = RLEvaluationConfig()
    checkpoint_every_steps: int | None = 10
    """Steps between two checkpoints, where there is a folder; None writes only the last."""
    shuffle_rewards: bool = False
    """Deal the rewards of a step out anew by chance: a placebo, which must not learn."""
    rollout_only: bool = False
    """Draw and judge, and train nothing."""
    replay: str = ""
    """A file of rollouts to train on, in place of an engine."""
    stall_timeout_s: float = 300.0
    """Seconds without progress after which a run with placement async, or one with workers, ends
    and says who waits for whom."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(
            steps=self.steps,
            prompts_per_step=self.prompts_per_step,
            group_size=self.group_size,
            max_tokens=self.max_tokens,
            max_turns=self.max_turns,
            microbatch_tokens=self.microbatch_tokens,
            max_num_seqs=self.max_num_seqs,
            threads=self.threads,
            verifier_workers=self.verifier_workers,
            checkpoint_every_steps=self.checkpoint_every_steps,
        )
        bounds.count(
            0,
            max_staleness=self.max_staleness,
            max_pending_rewards=self.max_pending_rewards,
            max_cudagraph_capture_size=self.max_cudagraph_capture_size,
            extra_prompts=self.extra_prompts,
        )
        bounds.positive(
            stall_timeout_s=self.stall_timeout_s, environment_timeout_s=self.environment_timeout_s
        )
        if str(self.placement) == "synchronous":
            what = "two placements are synchronous"
            bounds.add("placement", what, "use disaggregated, or colocated to share memory")
        else:
            bounds.one_of("placement", self.placement, PLACEMENTS)
        if self.precision is not None:
            bounds.one_of("precision", self.precision, get_args(RLPrecision))
        bounds.one_of("engine_weights", self.engine_weights, get_args(EngineWeightFormat))
        if bounds.is_valid(
            "placement", "max_staleness", "prompts_per_step", "steps", "extra_prompts"
        ):
            try:
                _ = self.rollout_policy
            except InputError as error:
                bounds.problems += error.problems
        bounds.problems += find_rl_layout_problems(self)
        bounds.problems += find_adapter_problems(self)
        if bounds.is_valid(
            "prompts_per_step", "group_size", "max_num_seqs", "max_cudagraph_capture_size"
        ):
            try:
                _ = self.scheduler_config
            except InputError as error:
                bounds.problems += error.problems
        if self.extra_prompts and not self.objective.is_group_relative:
            what = (
                f"with {self.objective.adv_estimator} groups of equal rewards teach something too"
            )
            bounds.add("extra_prompts", what, "use 0")
        if self.group_size == 1 and self.objective.is_group_relative and not self.rollout_only:
            what = (
                f"{self.objective.adv_estimator} compares answers to a prompt with each other, and"
            )
            fix = "use 2 or more, or objective.adv_estimator=whitened or gae"
            bounds.add("group_size", f"{what} one alone teaches nothing", fix)
        if self.rollout_only and self.replay:
            what = "there is nothing to draw where rollouts are replayed"
            bounds.add("rollout_only", what, "use one of both")
        if (self.rollout_only or self.replay) and self.placement != "disaggregated":
            what = f"{self.placement} needs an engine and a trainer"
            bounds.add("placement", what, "use disaggregated")
        if self.overlaps and self.evaluate.every_steps is not None:
            what = f"the engine is never idle in an {self.placement} run"
            bounds.add("evaluate.every_steps", what, "leave it out, or use disaggregated")
        bounds.raise_problems()

    @property
    def scheduler_config(self) -> SchedulerConfig:
        """What one engine takes at a time."""
        rows = self.engine_max_num_seqs
        # One that sleeps while the trainer works would capture its steps anew in every step.
        captured = 0 if self.placement == "colocated" else self.max_cudagraph_capture_size
        return SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=max(8192, rows),
            max_cudagraph_capture_size=captured,
        )

    @property
    def rollout_policy(self) -> RolloutPolicy:
        """What the controller goes by."""
        return build_rollout_policy(
            self.placement,
            groups=self.prompts_per_step,
            steps=self.steps,
            max_staleness=self.max_staleness,
            extra_groups=self.extra_prompts,
        )

    @property
    def max_staleness_steps(self) -> int:
        """The most steps that weights may be behind."""
        return self.rollout_policy.max_staleness

    @property
    def engine_max_num_seqs(self) -> int:
        """Answers that one engine writes at a time: workers share a step's prompts."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        prompts = -(-self.prompts_per_step // max(1, self.workers.num_workers))
        return min(prompts * self.group_size, _MOST_REQUESTS)

    @property
    def total_updates(self) -> int:
        """Updates of all steps: what learning rates follow."""
        return self.steps * self.objective.minibatches

    @property
    def critic_optimizer(self) -> OptimizerConfig:
        """How the critic is updated: as the policy, but for its learning rate."""
        if self.critic.lr is None:
            return self.optimizer
        return msgspec.structs.replace(self.optimizer, lr=self.critic.lr)

    @property
    def overlaps(self) -> bool:
        """Whether engine and trainer work at the same time."""
        return self.placement in ("one_step_off", "async")
