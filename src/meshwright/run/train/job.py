"""`Job`: everything one training run is told, as it stands in its TOML file.

The model, the layout and the workload are the values that predict and plan take; a file may name a
cluster beside them, so that `mw simulate` reads the same file. Every other table belongs to the
part of the trainer that reads it, and has its settings there.
"""

from dataclasses import replace
from typing import Any, Literal

import msgspec

from meshwright.errors import Problem
from meshwright.run.nn.build import Options
from meshwright.run.train.checkpoint.settings import CheckpointSettings
from meshwright.run.train.data.settings import DataSettings
from meshwright.run.train.guards import GuardSettings
from meshwright.run.train.job_check import problems_of, remarks_of
from meshwright.run.train.loss import LossSettings
from meshwright.run.train.optimizer.settings import OptimizerSettings
from meshwright.run.train.outputs.settings import OutputSettings
from meshwright.spec.bounds import Bounds
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, flops_per_token
from meshwright.spec.workload import Training


class EvaluationSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the model is tried on text that it is not trained on."""

    every_steps: int = 0
    """Steps between evaluations; 0 evaluates only at the end, where there is held-out text."""
    sequences: int = 64
    """Sequences of each evaluation: the same ones every time."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.count(least=0, every_steps=self.every_steps)
        bounds.count(sequences=self.sequences)
        bounds.require()


class ExpertSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How routed experts are trained, beyond what the model says."""

    capacity_factor: float | None = None
    """Tokens that an expert takes of those that a rank routes together, a microbatch or the rank's
    share of one, as a multiple of what it would get if all got the same. The first ones are taken;
    the choices of others count for nothing. None takes all."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.positive(capacity_factor=self.capacity_factor)
        bounds.require()


class AlgorithmChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A collective that an algorithm carries out in place of NCCL's or gloo's own."""

    group: str
    """Whose: ranks that differ along these axes only, such as `dp-cp`, over which gradients are
    added up."""
    operation: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    """Which."""
    algorithm: str
    """By which: a name of `mw collective list`, such as `ring`."""


class MachineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the device at hand is used; none of it changes what is computed."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; `auto` takes the GPU where there is one."""
    tuned_products: bool = True
    """Time cuBLASLt's algorithms for each shape at the start and keep the fastest. Off, two runs
    on one GPU agree to the last bit."""
    graph: bool | Literal["auto"] = "auto"
    """Record forward and backward once as a CUDA graph and replay it; `auto` does so for models
    small enough for the host to be the bottleneck."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""
    patience_s: float = 300.0
    """How long ranks wait for one another in a collective before the job ends and says for whom."""
    algorithms: tuple[AlgorithmChoice, ...] = ()
    """Collectives that are carried out by an algorithm of choice."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.readable(algorithms=self.algorithms)
        bounds.count(threads=self.threads)
        bounds.positive(patience_s=self.patience_s)
        bounds.require()


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run: what is trained, on what, how, and what is written down."""

    model: Model
    """The architecture."""
    layout: Layout = Layout()
    """Batch split, precision, recompute and optimizer kind."""
    workload: Training
    """Tokens, sequence length and batch."""
    data: DataSettings
    """Where the tokens come from."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """Learning rate and its schedule, decay, clipping."""
    loss: LossSettings = LossSettings()
    """What is added to the cross-entropy of the next token."""
    experts: ExpertSettings = ExpertSettings()
    """Whether experts leave tokens out."""
    evaluation: EvaluationSettings = EvaluationSettings()
    """When to evaluate."""
    checkpoint: CheckpointSettings = CheckpointSettings()
    """When to save, and what to keep."""
    output: OutputSettings = OutputSettings()
    """Where figures go."""
    guards: GuardSettings = GuardSettings()
    """What to do about losses that are no numbers, or jump."""
    machine: MachineSettings = MachineSettings()
    """How the device is used."""
    start_from: str | None = None
    """A folder with a Hugging Face checkpoint to begin with; None draws weights from the seed."""
    seed: int = 0
    """Weights, order of the data and stochastic rounding all follow from it."""

    def check(self) -> tuple[Problem, ...]:
        """Return everything that keeps this job from running, with fixes."""
        factor = self.experts.capacity_factor
        return tuple(
            problems_of(
                self.model,
                self.layout,
                self.workload,
                self.machine.algorithms,
                capacity_factor=factor,
            )
        )

    def remarks(self) -> tuple[str, ...]:
        """Return what can run and is hardly meant."""
        factor = self.experts.capacity_factor
        return tuple(remarks_of(self.model, self.workload, self.optimizer, capacity_factor=factor))

    def kept(self) -> dict[str, Any]:
        """Return what more of a job of some kind may not change while its run goes on."""
        return {}

    def flops_per_token(self, length: int) -> float:
        """Return what training on one token takes, where attention spans so many positions."""
        return flops_per_token(self.model, length)

    def options(self) -> Options:
        """Return what the model's description leaves open, as its modules take it."""
        found = self.loss.options(self.model)
        return replace(found, capacity_factor=self.experts.capacity_factor)
