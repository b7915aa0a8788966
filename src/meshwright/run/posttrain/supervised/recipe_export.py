"""What a run of a recipe learnt, as others read it: an adapter of PEFT's, or a whole model."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.huggingface import save_hf_checkpoint
from meshwright.run.nn.weight_init import allocate_parameters
from meshwright.run.posttrain.lora import DecoderAdapter, attach_adapter, save_adapter
from meshwright.run.posttrain.supervised.recipe_config import RewardModelRecipe
from meshwright.run.posttrain.supervised.recipe_file import load_recipe
from meshwright.run.posttrain.supervised.recipe_job import RecipeJob
from meshwright.run.posttrain.supervised.recipe_task import load_initial_weights
from meshwright.run.posttrain.supervised.reward_model import HEAD_WEIGHT, save_reward_head
from meshwright.run.serve.tokenizer.tokenizer import load_tokenizer
from meshwright.run.train.checkpoint import CheckpointManager
from meshwright.run.train.run_folder.trained_weights import (
    check_export_folder,
    load_trained_weights,
)
from meshwright.run.train.train_step import get_weight_dtype

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


class RecipeExport(NamedTuple):
    """What was written."""

    job: RecipeJob
    step: int
    description: str
    """In words."""
    dtype: torch.dtype
    num_parameters: int


def export_recipe(
    run: Path,
    folder: Path,
    *,
    merge: bool = False,
    step: int | None = None,
    dtype: torch.dtype | None = None,
) -> RecipeExport:
    """Write what a run learnt: its adapter, or a whole model with tokenizer and template.

    `merge` puts the adapter into the weights it stands beside. `dtype` is that of the files; None
    is the adapter's own, or the format that the run multiplied with.
    """
    job = load_recipe(run / "config.toml").job
    assert isinstance(job, RecipeJob)
    if merge and job.adapter is None:
        what = "has no adapter: every weight was trained"
        raise InputError([Problem(str(run), what, "leave --merge-adapter out")])
    check_export_folder(folder, run, job.initial_load_path, job.tokenizer_path)
    own = get_weight_dtype(job.layout)
    if job.adapter is None:
        trained = load_trained_weights(run, job, step=step)
        return _whole(run, folder, job, trained.decoder, trained.step, dtype or own, "all weights")
    # Sums of weights and adapters are rounded once, when they are written.
    decoder = build_decoder(job.model, dtype=torch.float32 if merge else own)
    allocate_parameters(decoder, "cpu")
    assert job.initial_load_path is not None
    load_initial_weights(decoder, job.initial_load_path)
    adapter = attach_adapter(decoder, job.adapter.to_lora_config(), seed=job.seed)
    done = _fill(adapter, run, step)
    if merge:
        adapter.merge(keep=False)
        return _whole(run, folder, job, decoder, done, dtype or own, "adapter, merged")
    save_adapter(adapter, folder, base=job.initial_load_path, dtype=dtype)
    _head(run, folder, job, done)
    count = sum(one.numel() for one in adapter.parameters())
    return RecipeExport(job, done, "adapter", dtype or torch.float32, count)


def _whole(  # noqa: PLR0917 - of one shape for its two callers
    run: Path,
    folder: Path,
    job: RecipeJob,
    decoder: Decoder,
    step: int,
    dtype: torch.dtype,
    what: str,
) -> RecipeExport:
    save_hf_checkpoint(decoder, folder, dtype=dtype)
    _head(run, folder, job, step)
    copy_tokenizer(job.tokenizer_path, folder)
    return RecipeExport(job, step, what, dtype, sum(one.numel() for one in decoder.parameters()))


def _fill(adapter: DecoderAdapter, run: Path, step: int | None) -> int:
    into = {f"adapter.{name}": one.data for name, one in adapter.named_parameters()}
    return load_checkpoint_tensors(run, into, step)


def _head(run: Path, folder: Path, job: RecipeJob, step: int) -> None:
    if isinstance(job.recipe, RewardModelRecipe):
        head = torch.zeros(1, job.model.hidden)
        load_checkpoint_tensors(run, {f"reward.{HEAD_WEIGHT}": head}, step)
        save_reward_head(head, folder)


def load_checkpoint_tensors(run: Path, into: Mapping[str, Tensor], step: int | None) -> int:
    """Fill tensors from a checkpoint of a run, the newest or that of a step; return its step."""
    with CheckpointManager(run / "checkpoints") as checkpoints:
        if not checkpoints.list_saved():
            what = "there is no checkpoint in this run"
            raise InputError([Problem(str(run), what, "let mw train save one first")])
        return checkpoints.load(into, step, leftover="ignore").step


def copy_tokenizer(source: str, folder: Path) -> None:
    """Write the tokenizer and template that lie at a path into a model's folder."""
    path = Path(source)
    if path.is_dir():
        for name in _FILES:
            if (path / name).is_file():
                shutil.copyfile(path / name, folder / name)
        return
    words = load_tokenizer(path)
    words.backend_tokenizer.save(str(folder / "tokenizer.json"))
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **words.special_tokens}
    _write(folder / "tokenizer_config.json", about)
    _write(folder / "generation_config.json", {"eos_token_id": sorted(words.eos_token_ids)})
    if words.chat_template is not None:
        (folder / "chat_template.jinja").write_text(words.chat_template.source, encoding="utf-8")


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
