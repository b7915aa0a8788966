"""`load_trained`: the weights that a run has come to, without the rest of its state."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.nn.build import build
from meshwright.run.nn.decoder import Decoder
from meshwright.run.train.checkpoint import Checkpoints
from meshwright.run.train.checkpoint.folder import is_sound, read_record
from meshwright.run.train.checkpoint.image import TORCH_DTYPES
from meshwright.run.train.job import Job
from meshwright.run.train.step import weight_format
from meshwright.spec.model import Model

Which = Literal["weights", "average"]


class Trained(NamedTuple):
    """A decoder in main memory, as a run left it."""

    decoder: Decoder
    """In the most exact format that the run keeps the weights in."""
    step: int
    """Steps that were done."""
    format: torch.dtype
    """What the run itself multiplies with."""


def load_trained(
    folder: Path, job: Job, *, which: Which = "weights", step: int | None = None
) -> Trained:
    """Load the weights of a run, or their moving average, from its newest or a chosen checkpoint.

    Where the run keeps fp32 masters, those are loaded.
    """
    own = weight_format(job.layout)
    averaged = which == "average"
    if averaged and job.optimizer.average is None:
        raise InputError([no_average(folder)])
    exact = averaged or job.layout.master_precision == "fp32"
    kind = torch.float32 if exact else own
    found = load_weights(folder, job.model, dtype=kind, averaged=averaged, step=step)
    return found._replace(format=own)


def load_weights(
    folder: Path,
    model: Model,
    *,
    dtype: torch.dtype = torch.float32,
    averaged: bool = False,
    step: int | None = None,
) -> Trained:
    """Load what a run's checkpoint has of a model, into weights of a format."""
    decoder = build(model, device="meta", dtype=dtype)
    decoder.to_empty(device="cpu")
    with Checkpoints(folder / "checkpoints") as checkpoints:
        saved = _formats(checkpoints, folder)
        into, rounded = {}, []
        for name, value in decoder.state_dict().items():
            source = _source(name, saved, averaged=averaged)
            kept = value if saved[source] == value.dtype else value.to(saved[source])
            into[source] = kept
            rounded += [(value, kept)] if kept is not value else []
        loaded = checkpoints.load(into, step, leftover="leave")
    for value, kept in rounded:
        value.copy_(kept)
    return Trained(decoder, loaded.step, saved["model.embedding.weight"])


def no_average(folder: Path) -> Problem:
    """Say that there is no average to be had."""
    what = "this run keeps no average of its weights"
    fix = "set optimizer.average before training, or export the weights"
    return Problem(str(folder), what, fix)


def require_apart(folder: Path, *kept: str | Path | None) -> None:
    """Refuse to write a model into the run that it comes from, or over what the run began with."""
    for each in kept:
        if each and folder.exists() and Path(each).exists() and folder.samefile(each):
            what = "is what the run was made from or keeps, and would be written over"
            raise InputError([Problem(str(folder), what, "name another folder to write")])


def _formats(checkpoints: Checkpoints, folder: Path) -> dict[str, torch.dtype]:
    """Return the names and formats of a checkpoint's tensors: all of a run have the same."""
    for found in reversed(checkpoints.list()):
        if is_sound(found):
            tensors = read_record(found.path).tensors
            return {name: TORCH_DTYPES[tensor.dtype] for name, tensor in tensors.items()}
    what = "there is no checkpoint in this run"
    raise InputError([Problem(str(folder), what, "let mw train save one first")])


def _source(name: str, saved: Mapping[str, object], *, averaged: bool) -> str:
    """Return the most exact of the saved tensors that a weight can be taken from."""
    exact = f"optimizer.{'average' if averaged else 'master'}.{name}"
    return exact if exact in saved else f"model.{name}"  # all else has only the model's own
