"""The policy that a run of reinforcement learning came to, as a Hugging Face folder.

Of a run that trained an adapter that is the adapter, as PEFT has it, or the model with it merged.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from meshwright.errors import InputError, Problem
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.huggingface import load_hf_checkpoint, save_hf_checkpoint
from meshwright.run.nn.weight_init import allocate_parameters
from meshwright.run.posttrain.lora import DecoderAdapter, attach_adapter, save_adapter
from meshwright.run.posttrain.rl.config.rl_config import AdapterConfig, RLConfig
from meshwright.run.posttrain.rl.rendezvous import build_trainer_layout
from meshwright.run.posttrain.supervised.recipe_export import (
    copy_tokenizer,
    load_checkpoint_tensors,
)
from meshwright.run.train.run_folder.trained_weights import (
    check_export_folder,
    load_checkpoint_weights,
    make_missing_ema_problem,
)
from meshwright.run.train.train_step import get_weight_dtype
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import load_config


class PolicyExport(NamedTuple):
    """What was written."""

    model: Model
    step: int
    description: str
    """In words."""
    dtype: torch.dtype
    num_parameters: int


def export_policy(
    run: Path,
    settings: RLConfig,
    folder: Path,
    *,
    averaged: bool = False,
    merge: bool = False,
    step: int | None = None,
    dtype: torch.dtype | None = None,
) -> PolicyExport:
    """Write the policy with the tokenizer and template of the model that the run began with.

    The task of the settings is not loaded. `dtype` is that of the files; None is the run's own.
    Where an adapter was trained it is written alone, unless it is to `merge` with the model.
    """
    if merge and settings.adapter is None:
        what = "has no adapter: every weight was trained"
        raise InputError([Problem(str(run), what, "leave --merge-adapter out")])
    if not settings.model:
        what = "trained a small network from random weights, which no family of Hugging Face has"
        fix = "begin with a model to export what it learns: model=FOLDER"
        raise InputError([Problem(str(run), what, fix)])
    if not Path(settings.model).is_dir():
        what = f"began with {settings.model}, which is not there"
        fix = "run this where the run was begun, or put the folder back"
        raise InputError([Problem(str(run), what, fix)])
    if averaged and settings.optimizer.ema_decay is None:
        raise InputError([make_missing_ema_problem(run)])
    check_export_folder(folder, run, settings.model)
    model = load_config(settings.model)
    words = ", averaged" if averaged else ""
    if settings.adapter is not None:
        adapter = _empty_adapter(settings, settings.adapter, weights=merge)
        done = _fill(adapter, run, settings, averaged=averaged, step=step)
        if not merge:
            save_adapter(adapter, folder, base=settings.model, dtype=dtype)
            count, kind = _count(adapter), dtype or torch.float32
            return PolicyExport(model, done, f"adapter{words}", kind, count)
        adapter.merge(keep=False)
        kind, decoder = dtype or _format(settings), adapter.decoder
        save_hf_checkpoint(decoder, folder, dtype=kind)
        copy_tokenizer(settings.model, folder)
        return PolicyExport(model, done, f"adapter{words}, merged", kind, _count(decoder))
    trained = load_checkpoint_weights(run, model, averaged=averaged, step=step)
    kind = dtype or trained.dtype
    save_hf_checkpoint(trained.decoder, folder, dtype=kind)
    copy_tokenizer(settings.model, folder)
    return PolicyExport(model, trained.step, f"policy{words}", kind, _count(trained.decoder))


def _empty_adapter(settings: RLConfig, own: AdapterConfig, *, weights: bool) -> DecoderAdapter:
    """Return an adapter to be filled, beside the model's `weights` where these are needed."""
    # Sums of weights and adapters are rounded once, when they are written.
    kind = torch.float32 if weights else torch.bfloat16
    decoder = build_decoder(load_config(settings.model), dtype=kind)
    allocate_parameters(decoder, "cpu")
    if weights:
        load_hf_checkpoint(decoder, settings.model)
    return attach_adapter(decoder, own.to_lora_config(), seed=settings.seed)


def _fill(
    adapter: DecoderAdapter, run: Path, settings: RLConfig, *, averaged: bool, step: int | None
) -> int:
    """Fill an adapter, or its average, from a checkpoint; return the step."""
    rounded = averaged and settings.optimizer.ema_dtype == "bf16"
    kind = torch.bfloat16 if rounded else torch.float32
    kept = "optimizer.average" if averaged else "adapter"
    found = {name: torch.empty_like(one, dtype=kind) for name, one in adapter.named_parameters()}
    done = load_checkpoint_tensors(
        run, {f"{kept}.{name}": one for name, one in found.items()}, step
    )
    for name, one in adapter.named_parameters():
        one.data.copy_(found[name])
    return done


def _format(settings: RLConfig) -> torch.dtype:
    """Return what the weights beside an adapter are multiplied in."""
    kind = settings.device.partition(":")[0]
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    return get_weight_dtype(build_trainer_layout(settings, kind))


def _count(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())
