"""What a run of a recipe learnt, as others read it: an adapter of PEFT's, or a whole model."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.build import build
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.huggingface import save
from meshwright.run.nn.initialise import give_memory
from meshwright.run.posttrain.adapters import DecoderAdapter, adapt, save_adapter
from meshwright.run.posttrain.supervised.job import RecipeJob
from meshwright.run.posttrain.supervised.job_file import ask_recipe
from meshwright.run.posttrain.supervised.reward import WEIGHT, save_head
from meshwright.run.posttrain.supervised.settings import Reward
from meshwright.run.posttrain.supervised.task import load_start
from meshwright.run.serve.model.words import load_words
from meshwright.run.train.checkpoint import Checkpoints
from meshwright.run.train.step import weight_format
from meshwright.run.train.trained import load_trained, require_apart

_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


class Exported(NamedTuple):
    """What was written."""

    job: RecipeJob
    step: int
    what: str
    """In words."""
    format: torch.dtype
    parameters: int


def export_recipe(
    run: Path,
    folder: Path,
    *,
    merge: bool = False,
    step: int | None = None,
    dtype: torch.dtype | None = None,
) -> Exported:
    """Write what a run learnt: its adapter, or a whole model with tokenizer and template.

    `merge` puts the adapter into the weights it stands beside. `dtype` is that of the files; None
    is the adapter's own, or the format that the run multiplied with.
    """
    job = ask_recipe(run / "config.toml").job
    assert isinstance(job, RecipeJob)
    if merge and job.adapter is None:
        what = "has no adapter: every weight was trained"
        raise InputError([Problem(str(run), what, "leave --merge out")])
    require_apart(folder, run, job.start_from, job.words)
    own = weight_format(job.layout)
    if job.adapter is None:
        trained = load_trained(run, job, step=step)
        return _whole(run, folder, job, trained.decoder, trained.step, dtype or own, "all weights")
    # Sums of weights and adapters are rounded once, when they are written.
    decoder = build(job.model, dtype=torch.float32 if merge else own)
    give_memory(decoder, "cpu")
    assert job.start_from is not None
    load_start(decoder, job.start_from)
    adapter = adapt(decoder, job.adapter.lora(), seed=job.seed)
    done = _fill(adapter, run, step)
    if merge:
        adapter.merge(keep=False)
        return _whole(run, folder, job, decoder, done, dtype or own, "adapter, merged")
    save_adapter(adapter, folder, base=job.start_from, dtype=dtype)
    _head(run, folder, job, done)
    count = sum(one.numel() for one in adapter.parameters())
    return Exported(job, done, "adapter", dtype or torch.float32, count)


def _whole(  # noqa: PLR0917 - of one shape for its two callers
    run: Path,
    folder: Path,
    job: RecipeJob,
    decoder: Decoder,
    step: int,
    dtype: torch.dtype,
    what: str,
) -> Exported:
    save(decoder, folder, dtype=dtype)
    _head(run, folder, job, step)
    write_words(job.words, folder)
    return Exported(job, step, what, dtype, sum(one.numel() for one in decoder.parameters()))


def _fill(adapter: DecoderAdapter, run: Path, step: int | None) -> int:
    into = {f"adapter.{name}": one.data for name, one in adapter.named_parameters()}
    return load_tensors(run, into, step)


def _head(run: Path, folder: Path, job: RecipeJob, step: int) -> None:
    if isinstance(job.recipe, Reward):
        head = torch.zeros(1, job.model.hidden)
        load_tensors(run, {f"reward.{WEIGHT}": head}, step)
        save_head(head, folder)


def load_tensors(run: Path, into: Mapping[str, Tensor], step: int | None) -> int:
    """Fill tensors from a checkpoint of a run, the newest or that of a step; return its step."""
    with Checkpoints(run / "checkpoints") as checkpoints:
        if not checkpoints.list():
            what = "there is no checkpoint in this run"
            raise InputError([Problem(str(run), what, "let mw train save one first")])
        return checkpoints.load(into, step, leftover="leave").step


def write_words(source: str, folder: Path) -> None:
    """Write the tokenizer and template that lie at a path into a model's folder."""
    path = Path(source)
    if path.is_dir():
        for name in _FILES:
            if (path / name).is_file():
                shutil.copyfile(path / name, folder / name)
        return
    words = load_words(path)
    words.tokenizer.save(str(folder / "tokenizer.json"))
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", **words.special}
    _write(folder / "tokenizer_config.json", about)
    _write(folder / "generation_config.json", {"eos_token_id": sorted(words.ends)})
    if words.template is not None:
        (folder / "chat_template.jinja").write_text(words.template.source, encoding="utf-8")


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
