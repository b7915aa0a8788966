"""`Job`: everything one training run is told, as it stands in its TOML file.

The model, the layout and the workload are the values that predict and plan take; a file may name a
cluster beside them, so that `mw simulate` reads the same file. Every other table belongs to the
part of the trainer that reads it, and has its settings there.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.train.checkpoint.settings import CheckpointSettings
from meshwright.run.train.data.settings import DataSettings
from meshwright.run.train.guards import GuardSettings
from meshwright.run.train.optimizer.settings import OptimizerSettings
from meshwright.run.train.outputs.settings import OutputSettings
from meshwright.spec.bounds import Bounds
from meshwright.spec.files import load_data
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.names import unknown_name
from meshwright.spec.read import read
from meshwright.spec.resolve import Source, resolve
from meshwright.spec.work import read_model
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
    compile: Literal["none", "blocks"] = "none"
    """Compile each block with torch.compile, which pays where a model has operations without a
    fused kernel of its own."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""


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
        """Return everything that keeps this job from running on one device, with fixes."""
        return tuple(_problems(self))


PARTS = tuple(field.name for field in msgspec.structs.fields(Job))
"""The tables and values of a job file."""

BESIDE = ("cluster", "gpus")
"""What other commands read from the same file."""

_KINDS: dict[str, type[msgspec.Struct]] = {
    "layout": Layout,
    "workload": Training,
    "data": DataSettings,
    "optimizer": OptimizerSettings,
    "evaluation": EvaluationSettings,
    "checkpoint": CheckpointSettings,
    "output": OutputSettings,
    "guards": GuardSettings,
    "machine": MachineSettings,
}


def read_job(data: Mapping[str, Any], where: str = "") -> Job:
    """Read a job from plain data, listing every problem of all its tables at once."""
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for name, value in data.items():
        at = f"{where}{name}"
        if name in BESIDE:
            continue
        if name not in PARTS:
            problems.append(unknown_name("part", name, PARTS, at))
            continue
        try:
            values[name] = _part(name, value, at)
        except InputError as error:
            problems += error.problems
    for name in ("model", "workload", "data"):
        if name not in data:
            problems.append(Problem(f"{where}{name}", "is missing", _MISSING[name]))
    if problems:
        raise InputError(problems)
    return Job(**values)


_MISSING = {
    "model": 'add model = "…", a name of mw models, or a [model] table',
    "workload": "add [workload] with tokens, sequence_length and global_batch",
    "data": "add [data] with sources; mw data tokenize makes them",
}


def _part(name: str, value: object, where: str) -> object:
    if name == "model":
        return read_model(value, where)
    if name == "workload" and isinstance(value, Mapping) and "kind" not in value:
        value = {"kind": "training", **value}
    if name in _KINDS:
        return read(_KINDS[name], value, where)
    return read(str if name == "start_from" else int, value, where)


def load_job(path: str | Path, changes: Mapping[str, Any] | None = None) -> Job:
    """Read a job file, with changes laid over it; paths in it count from its folder."""
    sources = [Source(str(path), load_data(path)), Source("command line", changes or {})]
    job = read_job(resolve(sources).data)
    found = job.check()
    if found:
        raise InputError(found)
    return job


def _problems(job: Job) -> list[Problem]:
    layout, batch = job.layout, job.workload.global_batch
    found = []
    if layout.gpus > 1:
        what = f"asks for {layout.gpus} GPUs, and this trainer runs on one"
        found.append(Problem("layout", what, "set tp, cp, pp and dp to 1"))
    if batch % layout.microbatch:
        what = f"{layout.microbatch} does not divide the global batch of {batch}"
        fits = max(n for n in range(1, min(layout.microbatch, batch) + 1) if batch % n == 0)
        found.append(Problem("layout.microbatch", what, f"use {fits}"))
    if layout.global_batch not in {None, batch}:
        what = f"{layout.global_batch} is not the workload's {batch}"
        found.append(Problem("layout.global_batch", what, "leave it out"))
    if layout.precision in {"mxfp8", "nvfp4"}:
        what = f"{layout.precision} needs tensor cores with block scaling (Blackwell)"
        found.append(Problem("layout.precision", what, "use fp8-blockwise or bf16"))
    if layout.offload:
        found.append(Problem("layout.offload", "is not done by this trainer", "leave it out"))
    if job.workload.adapter is not None:
        what = "training beside frozen weights is not done by this trainer"
        found.append(Problem("workload.adapter", what, "leave it out"))
    return found
