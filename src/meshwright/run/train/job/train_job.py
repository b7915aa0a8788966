"""`TrainJob`: everything one training run is told, as it stands in its TOML file.

The model, the layout and the workload are the values that predict and plan take; a file may name a
cluster beside them, so that `mw simulate` reads the same file. Every other table belongs to the
part of the trainer that reads it, and has its settings there.
"""

from dataclasses import replace
from typing import Any, Literal

import msgspec

from meshwright.errors import Problem
from meshwright.run.nn.decoder_builder import BuildOptions
from meshwright.run.train.checkpoint.checkpoint_config import CheckpointConfig
from meshwright.run.train.data.data_config import DataConfig
from meshwright.run.train.job.job_validation import find_job_problems, iter_job_warnings
from meshwright.run.train.job.loss_config import LossConfig
from meshwright.run.train.logging.logging_config import LoggingConfig
from meshwright.run.train.loss_guard import LossGuardConfig
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, flops_per_token
from meshwright.spec.workload import TrainingWorkload


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When the model is tried on text that it is not trained on."""

    every_steps: int = 0
    """Steps between evaluations; 0 evaluates only at the end, where there is held-out text."""
    sequences: int = 64
    """Sequences of each evaluation: the same ones every time."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(least=0, every_steps=self.every_steps)
        bounds.count(sequences=self.sequences)
        bounds.raise_problems()


class MoEConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How routed experts are trained, beyond what the model says."""

    capacity_factor: float | None = None
    """Tokens that an expert takes of those that a rank routes together, a microbatch or the rank's
    share of one, as a multiple of what it would get if all got the same. The first ones are taken;
    the choices of others count for nothing. None takes all."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.positive(capacity_factor=self.capacity_factor)
        bounds.raise_problems()


class AlgorithmChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A collective that an algorithm carries out in place of NCCL's or gloo's own."""

    group: str
    """Whose: ranks that differ along these axes only, such as `dp-cp`, over which gradients are
    added up."""
    operation: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    """Which."""
    algorithm: str
    """By which: a name of `mw collective list`, such as `ring`."""


class DeviceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the device at hand is used; none of it changes what is computed."""

    type: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; `auto` takes the GPU where there is one."""
    tuned_gemm: bool = True
    """Time cuBLASLt's algorithms for each shape at the start and keep the fastest. Off, two runs
    on one GPU agree to the last bit."""
    cuda_graph: bool | Literal["auto"] = "auto"
    """Record forward and backward once as a CUDA graph and replay it; `auto` does so for models
    small enough for the host to be the bottleneck."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""
    collective_timeout_s: float = 300.0
    """How long ranks wait for one another in a collective before the job ends and says for whom."""
    collective_algorithms: tuple[AlgorithmChoice, ...] = ()
    """Collectives that are carried out by an algorithm of choice."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.mark_unreadable(collective_algorithms=self.collective_algorithms)
        bounds.count(threads=self.threads)
        bounds.positive(collective_timeout_s=self.collective_timeout_s)
        bounds.raise_problems()


class TrainJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One training run: what is trained, on what, how, and what is written down."""

    model: Model
    """The architecture."""
    layout: Layout = Layout()
    """Batch split, precision, recompute and optimizer kind."""
    workload: TrainingWorkload
    """Tokens, sequence length and batch."""
    data: DataConfig
    """Where the tokens come from."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Learning rate and its schedule, decay, clipping."""
    loss: LossConfig = LossConfig()
    """What is added to the cross-entropy of the next token."""
    moe: MoEConfig = MoEConfig()
    """Whether experts leave tokens out."""
    eval: EvalConfig = EvalConfig()
    """When to evaluate."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When to save, and what to keep."""
    logging: LoggingConfig = LoggingConfig()
    """Where figures go."""
    loss_guard: LossGuardConfig = LossGuardConfig()
    """What to do about losses that are no numbers, or jump."""
    device: DeviceConfig = DeviceConfig()
    """How the device is used."""
    initial_load_path: str | None = None
    """A folder with a Hugging Face checkpoint to begin with; None draws weights from the seed."""
    seed: int = 0
    """Weights, order of the data and stochastic rounding all follow from it."""

    def check(self) -> tuple[Problem, ...]:
        """Return everything that keeps this job from running, with fixes."""
        factor = self.moe.capacity_factor
        return tuple(
            find_job_problems(
                self.model,
                self.layout,
                self.workload,
                self.device.collective_algorithms,
                capacity_factor=factor,
            )
        )

    def list_warnings(self) -> tuple[str, ...]:
        """Return what can run and is hardly meant."""
        factor = self.moe.capacity_factor
        return tuple(
            iter_job_warnings(self.model, self.workload, self.optimizer, capacity_factor=factor)
        )

    def resume_invariants(self) -> dict[str, Any]:
        """Return what more of a job of some kind may not change while its run goes on."""
        return {}

    def flops_per_token(self, length: int) -> float:
        """Return what training on one token takes, where attention spans so many positions."""
        return flops_per_token(self.model, length)

    def make_build_options(self) -> BuildOptions:
        """Return what the model's description leaves open, as its modules take it."""
        found = self.loss.make_build_options(self.model)
        return replace(found, capacity_factor=self.moe.capacity_factor)
