"""The policy that a run of reinforcement learning came to, as a Hugging Face folder."""

from pathlib import Path
from typing import NamedTuple

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.nn.huggingface import save
from meshwright.run.posttrain.loop.settings import LoopSettings
from meshwright.run.posttrain.supervised.export import write_words
from meshwright.run.train.trained import load_weights, no_average, require_apart
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import load_config


class ExportedPolicy(NamedTuple):
    """What was written."""

    model: Model
    step: int
    format: torch.dtype
    parameters: int


def export_policy(
    run: Path,
    settings: LoopSettings,
    folder: Path,
    *,
    averaged: bool = False,
    step: int | None = None,
    dtype: torch.dtype | None = None,
) -> ExportedPolicy:
    """Write the policy with the tokenizer and template of the model that the run began with.

    The task of the settings is not loaded. `dtype` is that of the files; None is the run's own.
    """
    if not settings.model:
        what = "trained a small network from random weights, which no family of Hugging Face has"
        fix = "begin with a model to export what it learns: model=FOLDER"
        raise InputError([Problem(str(run), what, fix)])
    if not Path(settings.model).is_dir():
        what = f"began with {settings.model}, which is not there"
        fix = "run this where the run was begun, or put the folder back"
        raise InputError([Problem(str(run), what, fix)])
    if averaged and settings.optimizer.average is None:
        raise InputError([no_average(run)])
    require_apart(folder, run, settings.model)
    model = load_config(settings.model)
    trained = load_weights(run, model, averaged=averaged, step=step)
    kind = dtype or trained.format
    save(trained.decoder, folder, dtype=kind)
    write_words(settings.model, folder)
    count = sum(one.numel() for one in trained.decoder.parameters())
    return ExportedPolicy(model, trained.step, kind, count)
