"""`load_trained_weights`: the weights that a run has come to, without the rest of its state."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.train.checkpoint import CheckpointManager
from meshwright.run.train.checkpoint.checkpoint_folder import is_complete, read_metadata
from meshwright.run.train.checkpoint.safetensors_layout import TORCH_DTYPES
from meshwright.run.train.job.train_job import TrainJob
from meshwright.run.train.train_step import get_weight_dtype
from meshwright.spec.model import Model

WeightSource = Literal["weights", "ema"]


class TrainedWeights(NamedTuple):
    """A decoder in main memory, as a run left it."""

    decoder: Decoder
    """In the most exact format that the run keeps the weights in."""
    step: int
    """Steps that were done."""
    dtype: torch.dtype
    """What the run itself multiplies with."""


def load_trained_weights(
    folder: Path, job: TrainJob, *, which: WeightSource = "weights", step: int | None = None
) -> TrainedWeights:
    """Load the weights of a run, or their moving average, from its newest or a chosen checkpoint.

    Where the run keeps fp32 masters, those are loaded.
    """
    own = get_weight_dtype(job.layout)
    averaged = which == "ema"
    if averaged and job.optimizer.ema_decay is None:
        raise InputError([make_missing_ema_problem(folder)])
    exact = averaged or job.layout.master_precision == "fp32"
    kind = torch.float32 if exact else own
    found = load_checkpoint_weights(folder, job.model, dtype=kind, averaged=averaged, step=step)
    return found._replace(dtype=own)


def load_checkpoint_weights(
    folder: Path,
    model: Model,
    *,
    dtype: torch.dtype = torch.float32,
    averaged: bool = False,
    step: int | None = None,
) -> TrainedWeights:
    """Load what a run's checkpoint has of a model, into weights of a format."""
    decoder = build_decoder(model, device="meta", dtype=dtype)
    decoder.to_empty(device="cpu")
    with CheckpointManager(folder / "checkpoints") as checkpoints:
        saved = _formats(checkpoints, folder)
        into, rounded = {}, []
        for name, value in decoder.state_dict().items():
            source = _source(name, saved, averaged=averaged)
            kept = value if saved[source] == value.dtype else value.to(saved[source])
            into[source] = kept
            rounded += [(value, kept)] if kept is not value else []
        loaded = checkpoints.load(into, step, leftover="ignore")
    for value, kept in rounded:
        value.copy_(kept)
    return TrainedWeights(decoder, loaded.step, saved["model.embedding.weight"])


def make_missing_ema_problem(folder: Path) -> Problem:
    """Say that there is no average to be had."""
    what = "this run keeps no average of its weights"
    fix = "set optimizer.ema_decay before training, or export the weights"
    return Problem(str(folder), what, fix)


def check_export_folder(folder: Path, *kept: str | Path | None) -> None:
    """Refuse to write a model into the run that it comes from, or over what the run began with."""
    for each in kept:
        if each and folder.exists() and Path(each).exists() and folder.samefile(each):
            what = "is what the run was made from or keeps, and would be written over"
            raise InputError([Problem(str(folder), what, "name another folder to write")])


def _formats(checkpoints: CheckpointManager, folder: Path) -> dict[str, torch.dtype]:
    """Return the names and formats of a checkpoint's tensors: all of a run have the same."""
    for found in reversed(checkpoints.list_saved()):
        if is_complete(found):
            tensors = read_metadata(found.path).tensors
            return {name: TORCH_DTYPES[tensor.dtype] for name, tensor in tensors.items()}
    what = "there is no checkpoint in this run"
    raise InputError([Problem(str(folder), what, "let mw train save one first")])


def _source(name: str, saved: Mapping[str, object], *, averaged: bool) -> str:
    """Return the most exact of the saved tensors that a weight can be taken from."""
    exact = f"optimizer.{'average' if averaged else 'master'}.{name}"
    return exact if exact in saved else f"model.{name}"  # all else has only the model's own
