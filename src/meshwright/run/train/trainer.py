"""`Trainer`: everything of one run put together from its `Job`, and its state as one table.

The state of a run is its weights, what the optimizer keeps, what the guard remembers and the
number of steps done: the data is a function of the step, and so is the learning rate.
"""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from meshwright.errors import InputError, MissingPart, Problem
from meshwright.run.kernels.products import Products, fastest_products
from meshwright.run.train.checkpoint import Checkpoints
from meshwright.run.train.data.batches import Batches
from meshwright.run.train.data.opening import open_data
from meshwright.run.train.guards import Guard
from meshwright.run.train.job import Job
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.optimizer.parts import matrix_parts
from meshwright.run.train.step import TrainStep, make_decoder
from meshwright.spec.workload import Training

BALANCE_RATE = 0.001
"""How far a step moves the bias that balances experts (DeepSeek-V3, arXiv 2412.19437 §4.2)."""


class Trainer:
    """A run's decoder, optimizer, data, guard and checkpoints."""

    def __init__(self, job: Job, folder: Path) -> None:
        """Put a run together; nothing of an earlier one is loaded yet."""
        self.job, self.folder = job, folder
        self.device = pick_device(job)
        self.steps = job.workload.steps
        self.step_number = 0
        self.tokens_seen = 0
        self._saved_at: int | None = None
        self.batches = open_data(
            job.data, job.workload, seed=job.seed, vocabulary_size=job.model.vocab
        )
        self.held_out = _held_out(job)
        products: Products | None = None
        if job.machine.tuned_products:
            products = fastest_products(self.device)
        self.decoder = make_decoder(
            job.model, job.layout, device=self.device, seed=job.seed, products=products
        )
        if job.start_from is not None:
            from meshwright.run.nn.huggingface import load

            load(self.decoder, Path(job.start_from))
        self.optimizer = make_optimizer(
            self.decoder.named_parameters(),
            job.layout,
            job.optimizer,
            total_steps=self.steps,
            seed=job.seed,
            parts=matrix_parts(self.decoder),
        )
        balanced = any(part.balance is not None for part in self.decoder.experts())
        self.step = TrainStep(
            self.decoder,
            self.optimizer,
            microbatch=job.layout.microbatch,
            balance_rate=BALANCE_RATE if balanced else 0.0,
        )
        self.guard = Guard(job.guards)
        self.checkpoints = Checkpoints(folder / "checkpoints", job.checkpoint)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that a resumed run needs: the run's own, not copies."""
        state = {f"model.{name}": value for name, value in self.decoder.state_dict().items()}
        kept = self.optimizer.state_dict()
        return state | {f"optimizer.{name}": value for name, value in kept.items()}

    def save_once(self) -> None:
        """Save the state after the steps done so far, unless that was the last thing saved."""
        if self._saved_at == self.step_number:
            return
        self._saved_at = self.step_number
        extra = {
            "tokens_seen": self.tokens_seen,
            "guard": self.guard.to_save(),
            "data": self.batches.fingerprint,
            "kept": _kept(self.job),
        }
        self.checkpoints.save(self.step_number, self.tensors(), extra)

    def resume(self) -> bool:
        """Go on from the newest checkpoint that is whole; False where there is none."""
        if self.checkpoints.latest() is None:
            return False
        loaded = self.checkpoints.load(self.tensors())
        self._compare(loaded.extra)
        self.step_number = self._saved_at = loaded.step
        self.tokens_seen = int(loaded.extra["tokens_seen"])
        self.guard = Guard(self.job.guards, loaded.extra["guard"])
        return True

    def _compare(self, extra: Mapping[str, Any]) -> None:
        """Refuse to go on with a job that would not be the same run."""
        now, then = dict(_leaves(_kept(self.job))), dict(_leaves(extra["kept"]))
        fix = "change it back, or begin anew with --fresh"
        problems = [
            Problem(name, f"is {now.get(name)!r}, and the run began with {then.get(name)!r}", fix)
            for name in dict.fromkeys((*now, *then))
            if now.get(name) != then.get(name)
        ]
        if extra["data"] != self.batches.fingerprint:
            what = "tokens, their order or their blend are not those the run began with"
            problems.append(Problem("data", what, fix))
        if problems:
            raise InputError(problems)

    def close(self) -> None:
        """Wait for what is being written, and let go."""
        self.checkpoints.close()


def pick_device(job: Job) -> torch.device:
    """Return the device a job trains on."""
    asked = job.machine.device
    if asked == "cuda" and not torch.cuda.is_available():
        hint = 'set machine.device = "cpu", or leave it out'
        raise MissingPart("the job asks for a CUDA device, and torch sees none", hint)
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    if job.machine.threads is not None:
        torch.set_num_threads(job.machine.threads)
    return (
        torch.device(asked, torch.cuda.current_device()) if asked == "cuda" else torch.device(asked)
    )


def _held_out(job: Job) -> Batches | None:
    if not job.data.validation and not job.data.validation_sources:
        if job.evaluation.every_steps:
            warnings.warn("nothing is held out, so nothing is evaluated", stacklevel=2)
        return None
    # A held-out batch is one microbatch: what fits in training fits here.
    asked: Training = msgspec.structs.replace(
        job.workload, global_batch=min(job.layout.microbatch, job.evaluation.sequences)
    )
    return open_data(
        job.data, asked, seed=job.seed, split="validation", vocabulary_size=job.model.vocab
    )


def _kept(job: Job) -> dict[str, Any]:
    """Return what makes a run the run it is; everything else may change when it goes on."""
    return {
        "model": msgspec.to_builtins(job.model),
        "workload": {
            "sequence_length": job.workload.sequence_length,
            "global_batch": job.workload.global_batch,
        },
        "seed": job.seed,
        "start_from": job.start_from,
    }


def _leaves(data: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """Go through the values of nested data with the path of each."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            yield from _leaves(value, f"{path}.{name}" if path else name)
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, data
