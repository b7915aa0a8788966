"""`LoopSettings`: a run of reinforcement learning, as its file and the command line give it.

Whoever reads settings needs no torch.
"""

from typing import Literal, get_args

import msgspec

from meshwright.errors import InputError
from meshwright.policy.rollout.arrangement import PLACEMENTS, Arrangement, Placement, arranged
from meshwright.run.posttrain.adapters.settings import AdapterSettings
from meshwright.run.posttrain.loop.adapter_refusals import adapter_problems
from meshwright.run.posttrain.loop.objective import CriticSettings, ObjectiveSettings
from meshwright.run.posttrain.loop.ranks.refusals import layout_problems
from meshwright.run.posttrain.questions.task_settings import DIGITS, QUESTIONS, TaskSettings
from meshwright.run.posttrain.rollouts.verifiers.check import VerifierLimits
from meshwright.run.posttrain.workers.settings import WorkerSettings
from meshwright.run.train.optimizer.settings import OptimizerSettings
from meshwright.spec.bounds import Bounds
from meshwright.spec.layout import Layout
from meshwright.spec.model import Attention, Block, Mlp, Model
from meshwright.spec.serving import Limits

Precision = Literal["fp32", "bf16"]
EngineWeights = Literal["model", "fp8"]
_MOST_REQUESTS = 1024

__all__ = [
    "DIGITS",
    "QUESTIONS",
    "AdapterSettings",
    "CriticSettings",
    "EvaluateSettings",
    "LoopSettings",
    "NetworkSettings",
    "ObjectiveSettings",
    "TaskSettings",
    "WarmUpSettings",
]


class NetworkSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A small model that is trained from random weights, where no folder is given."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    ffn: int = 192
    max_positions: int = 32
    """The longest prompt with its answer."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.count(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            ffn=self.ffn,
            max_positions=self.max_positions,
        )
        if bounds.sound("hidden", "heads") and self.hidden % self.heads:
            what = f"{self.hidden} numbers are not shared evenly by {self.heads} heads"
            bounds.add("heads", what, "use a divisor of hidden")
        bounds.require()

    def model(self, vocab: int) -> Model:
        """Return the model for a vocabulary.

        Positions are learned: where a digit stands says more here than how far others are.
        """
        width = self.hidden // self.heads
        mixer = Attention(heads=self.heads, kv_heads=self.heads, head_dim=width, rotary=None)
        return Model(
            name="from random weights",
            hidden=self.hidden,
            vocab=vocab,
            blocks=(Block(name="plain", mixer=mixer, mlp=Mlp(width=self.ffn)),),
            pattern=f"{self.layers}*plain",
            positions="learned",
            max_positions=self.max_positions,
        )


class WarmUpSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Supervised steps on right answers before the first rollout, where the task shows some."""

    steps: int = 0
    answers: int = 64
    """Of one step."""
    lr: float = 1e-3

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.count(0, steps=self.steps)
        bounds.count(answers=self.answers)
        bounds.positive(lr=self.lr)
        bounds.require()


class EvaluateSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Held-out prompts, sampled as in training, and greedily at the beginning and the end."""

    prompts: int = 0
    """How many; 0 evaluates nothing."""
    every_steps: int | None = None
    """Steps between two evaluations; None evaluates before the first and after the last."""
    transcripts: int = 5
    """Answers to the same prompts that are written down before and after."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.count(0, prompts=self.prompts, transcripts=self.transcripts)
        bounds.count(every_steps=self.every_steps)
        bounds.require()


def optimizer_of(model: str, *, adapted: bool = False) -> OptimizerSettings:
    """Return how a run learns that says nothing of it: a model that knows something, little.

    An adapter beside one learns at ten times its rate, as in other recipes.
    """
    rate = (1e-5 if adapted else 1e-6) if model else 1e-3
    return OptimizerSettings(lr=rate, schedule="linear", warmup_steps=0, decay=0.0)


class LoopSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run: generate groups of answers, judge them, train, and again."""

    steps: int = 100
    prompts: int = 32
    """Groups of one step: one for each prompt."""
    samples: int = 8
    """Answers to a prompt."""
    spare_prompts: int = 0
    """Further prompts that a step may ask where all rewards of a group are equal, so that it
    trains on groups that tell something (DAPO's dynamic sampling)."""
    max_tokens: int | None = None
    """Of one turn; None is what the task needs."""
    max_turns: int = 1
    seed: int = 0
    folder: str = ""
    """Where the run keeps its files, and goes on from; none keeps nothing."""
    task: TaskSettings = TaskSettings()
    model: str = ""
    """A Hugging Face folder; none trains `network` from random weights."""
    network: NetworkSettings = NetworkSettings()
    warm_up: WarmUpSettings = WarmUpSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    critic: CriticSettings = CriticSettings()
    """What learns values beside the policy, where `objective.advantage` is gae."""
    optimizer: OptimizerSettings = optimizer_of("")
    """`mw train` has a rate of 1e-6 where a `model` is given and nothing is said of it, and of 1e-5
    with an adapter."""
    adapter: AdapterSettings | None = None
    """What is trained beside frozen weights, as in other recipes; None trains every weight."""
    placement: Placement = "disaggregated"
    """Whether both sides work one after the other, with memory of their own (disaggregated) or
    taking turns with it (colocated), or at the same time."""
    max_staleness: int | None = None
    """How many steps behind the trainer the weights of a group may be: 0 for disaggregated
    and colocated, 1 for one-step-off, and 1 unless said for asynchronous."""
    device: str = "auto"
    precision: Precision | None = None
    """Of weights, on both sides; None is fp32 on a processor and bf16 on a GPU."""
    engine_weights: EngineWeights = "model"
    """What the engine keeps matrices in: the trainer's numbers, or fp8 with a scale for each row,
    rounded anew with every version. `objective.correction` is made for what that changes."""
    layout: Layout = Layout()
    """How the ranks of the trainer share the model, as in other training; the default is one
    device. Numbers are in the run's `precision`, microbatches of `microbatch_tokens`."""
    threads: int | None = None
    """Of torch on a processor: small models are quickest with 1. None leaves it as it is."""
    microbatch_tokens: int = 16384
    """Tokens of one forward pass of the trainer, padding included."""
    batch_requests: int | None = None
    """Answers that an engine writes at a time; None is all that it gets of a step, 1024 at most."""
    workers: WorkerSettings = WorkerSettings()
    """Engines that draw in processes of their own."""
    graphs: bool = True
    """Capture the engine's decoding steps in CUDA graphs."""
    graph_tokens: int = 0
    """Capture its steps with prompts as well, up to so many tokens: where both sides work at the
    same time, prompts come in many steps, which the host would launch kernel by kernel."""
    verifier_workers: int = 1
    verifier: VerifierLimits = VerifierLimits()
    most_unjudged: int = 16
    """Verdicts of one step that may fail; with more the run ends, and names the verifier."""
    environment_s: float = 60.0
    """Seconds that an environment may take for its reply to a turn; the run ends where one takes
    longer, and names it."""
    evaluate: EvaluateSettings = EvaluateSettings()
    checkpoint_steps: int | None = 10
    """Steps between two checkpoints, where there is a folder; None writes only the last."""
    shuffle_rewards: bool = False
    """Deal the rewards of a step out anew by chance: a placebo, which must not learn."""
    rollout_only: bool = False
    """Draw and judge, and train nothing."""
    replay: str = ""
    """A file of rollouts to train on, in place of an engine."""
    stall_s: float = 300.0
    """Seconds without anything happening after which an asynchronous run, or one with workers, ends
    and says who waits for whom."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.count(
            steps=self.steps,
            prompts=self.prompts,
            samples=self.samples,
            max_tokens=self.max_tokens,
            max_turns=self.max_turns,
            microbatch_tokens=self.microbatch_tokens,
            batch_requests=self.batch_requests,
            threads=self.threads,
            verifier_workers=self.verifier_workers,
            checkpoint_steps=self.checkpoint_steps,
        )
        bounds.count(
            0,
            max_staleness=self.max_staleness,
            most_unjudged=self.most_unjudged,
            graph_tokens=self.graph_tokens,
            spare_prompts=self.spare_prompts,
        )
        bounds.positive(stall_s=self.stall_s, environment_s=self.environment_s)
        if str(self.placement) == "synchronous":
            what = "two placements are synchronous"
            bounds.add("placement", what, "use disaggregated, or colocated to share memory")
        else:
            bounds.one_of("placement", self.placement, PLACEMENTS)
        if self.precision is not None:
            bounds.one_of("precision", self.precision, get_args(Precision))
        bounds.one_of("engine_weights", self.engine_weights, get_args(EngineWeights))
        if bounds.sound("placement", "max_staleness", "prompts", "steps", "spare_prompts"):
            try:
                _ = self.arrangement
            except InputError as error:
                bounds.problems += error.problems
        bounds.problems += layout_problems(self)
        bounds.problems += adapter_problems(self)
        if bounds.sound("prompts", "samples", "batch_requests", "graph_tokens"):
            try:
                _ = self.limits
            except InputError as error:
                bounds.problems += error.problems
        if self.spare_prompts and not self.objective.compares:
            what = f"with {self.objective.advantage} groups of equal rewards teach something too"
            bounds.add("spare_prompts", what, "use 0")
        if self.samples == 1 and self.objective.compares and not self.rollout_only:
            what = f"{self.objective.advantage} holds answers to a prompt against each other, and"
            fix = "use 2 or more, or objective.advantage=whitened or gae"
            bounds.add("samples", f"{what} one alone teaches nothing", fix)
        if self.rollout_only and self.replay:
            what = "there is nothing to draw where rollouts are replayed"
            bounds.add("rollout_only", what, "use one of both")
        if (self.rollout_only or self.replay) and self.placement != "disaggregated":
            what = f"{self.placement} needs an engine and a trainer"
            bounds.add("placement", what, "use disaggregated")
        if self.overlaps and self.evaluate.every_steps is not None:
            what = f"the engine is never idle in an {self.placement} run"
            bounds.add("evaluate.every_steps", what, "leave it out, or use disaggregated")
        bounds.require()

    @property
    def limits(self) -> Limits:
        """What one engine takes at a time."""
        rows = self.engine_requests
        # One that sleeps while the trainer works would capture its steps anew in every step.
        captured = 0 if self.placement == "colocated" else self.graph_tokens
        return Limits(batch_requests=rows, batch_tokens=max(8192, rows), graph_tokens=captured)

    @property
    def arrangement(self) -> Arrangement:
        """What the controller goes by."""
        return arranged(
            self.placement,
            groups=self.prompts,
            steps=self.steps,
            max_staleness=self.max_staleness,
            spare=self.spare_prompts,
        )

    @property
    def staleness(self) -> int:
        """The most steps that weights may be behind."""
        return self.arrangement.max_staleness

    @property
    def engine_requests(self) -> int:
        """Answers that one engine writes at a time: workers share a step's prompts."""
        if self.batch_requests is not None:
            return self.batch_requests
        prompts = -(-self.prompts // max(1, self.workers.count))
        return min(prompts * self.samples, _MOST_REQUESTS)

    @property
    def updates(self) -> int:
        """Updates of all steps: what learning rates follow."""
        return self.steps * self.objective.minibatches

    @property
    def critic_rule(self) -> OptimizerSettings:
        """How the critic is updated: as the policy, but for its learning rate."""
        if self.critic.lr is None:
            return self.optimizer
        return msgspec.structs.replace(self.optimizer, lr=self.critic.lr)

    @property
    def overlaps(self) -> bool:
        """Whether engine and trainer work at the same time."""
        return self.placement in ("one-step-off", "asynchronous")
