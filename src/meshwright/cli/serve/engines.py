"""The engines behind `mw serve`: one, several that share the asks, or two kinds that share each."""

import argparse
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec

from meshwright.cli.flags.engine import read_engine_config
from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.policy.serving.router import ROUTING_POLICIES
from meshwright.spec.field_checks import check_number, raise_problems
from meshwright.spec.units import format_quantity, parse_count, parse_seconds

if TYPE_CHECKING:
    from meshwright.run.serve.client.process_client import ProcessEngineClient
    from meshwright.run.serve.engine.engine_config import EngineConfig
    from meshwright.run.serve.engine_client import EngineClient


def add_engines(parser: argparse.ArgumentParser) -> None:
    """Add how many engines there are, and what each of them does."""
    group = parser.add_argument_group("several engines")
    group.add_argument(
        "--replicas", "--data-parallel-size", metavar="N", dest="replicas",
        help="engines that share the requests",
    )  # fmt: skip
    group.add_argument(
        "--routing", "--load-balance-method", choices=ROUTING_POLICIES, default="prefix",
        metavar="WORD", dest="routing",
        help=f"who gets a request: {', '.join(ROUTING_POLICIES)} (default prefix)",
    )  # fmt: skip
    group.add_argument("--prefill-replicas", metavar="N", help="engines that only compute prompts")
    group.add_argument("--decode-replicas", metavar="N", help="engines that decode those prompts")
    group.add_argument(
        "--kv-transfer-backend", metavar="NAME",
        help="how keys and values get there: shm (shared memory, the default), tcp or nixl",
    )  # fmt: skip
    group.add_argument(
        "--startup-timeout", metavar="S",
        help="the longest an engine may take to start (default 1800)",
    )  # fmt: skip
    group.add_argument(
        "--no-multiprocessing", action="store_true",
        help="run the one engine in the server's own process",
    )  # fmt: skip


def start_engines(args: argparse.Namespace, path: Path) -> "tuple[EngineClient, list[str]]":
    """Start what the flags describe; return it with where the time of the start went."""
    first, then = _counts(args)
    settings = read_engine_config(args)
    start_s = _startup_timeout_s(args)
    if args.no_multiprocessing:
        if first + then > 1:
            what = "only one engine fits into the server's process"
            raise InputError([Problem("--no-multiprocessing", what, "leave it out")])
        return _here(settings, path)
    if first + then == 1:
        engines = _started([settings], path, start_s)
        return engines[0], _lines(engines, settings)
    from meshwright.run.serve.client.disaggregated_client import DisaggregatedEngineClient
    from meshwright.run.serve.client.routed_client import RoutedEngineClient

    if first:
        _check_handing(settings)
        settings = msgspec.structs.replace(
            settings, kv_transfer_backend=args.kv_transfer_backend or "shm"
        )
    engines = _started(assign_gpus(settings, first + then), path, start_s)
    block = settings.scheduler_config.block_size
    shared = {
        "block_tokens": block,
        "kept_blocks": max(
            1, min(engine.ready_message.kv_cache_tokens for engine in engines) // block
        ),
    }
    if not first:
        routed = RoutedEngineClient(engines, args.routing, weights=str(path), **shared)
        return routed, _lines(engines, settings)
    if not all(engine.ready_message.supports_kv_transfer for engine in engines):
        _end(engines)
        what = "KV transfer does not support recurrent states"
        raise InputError([Problem("--prefill-replicas", what, "use --replicas")])
    both = DisaggregatedEngineClient(
        engines[:first], engines[first:], args.routing, weights=str(path), **shared
    )
    return both, _lines(engines, settings)


def assign_gpus(settings: "EngineConfig", count: int) -> "list[EngineConfig]":
    """Return the settings of so many engines, each with GPUs of its own where there are some."""
    import torch

    from meshwright.run.serve.engine.runner_builder import resolve_device

    device = resolve_device(settings.device)
    if device.type != "cuda":
        return [settings] * count
    begin, there = device.index or 0, torch.cuda.device_count()
    if (needed := begin + count * settings.tensor_parallel_size) > there:
        each = format_quantity(settings.tensor_parallel_size, "GPU")
        what = f"{count} engines of {each} from cuda:{begin} on need {needed}"
        raise InputError([Problem("engines", f"{what}, torch sees {there}", "start fewer")])
    return [
        msgspec.structs.replace(
            settings, device=f"cuda:{begin + number * settings.tensor_parallel_size}"
        )
        for number in range(count)
    ]


def choose_num_threads(each: "Sequence[EngineConfig]") -> int | None:
    """Return with how many threads each of some engines computes; None leaves it to torch.

    Engines that all have as many as there are cores wait for each other: answers of a small model
    took nine times as long.
    """
    import torch

    from meshwright.run.serve.engine.runner_builder import resolve_device

    if len(each) == 1 or resolve_device(each[0].device).type != "cpu":
        return None
    return max(1, torch.get_num_threads() // len(each))


def format_start_times(took: Iterable[tuple[str, float]], room: int) -> list[str]:
    """Say where the time of the start went, and how many tokens there is room for."""
    took = list(took)
    total = sum(seconds for _, seconds in took)
    parts = ", ".join(f"{what} {seconds:.1f}" for what, seconds in took if seconds >= 0.05)
    where = f" ({parts})" if parts else ""
    return [f"ready in {total:.1f} s{where}", f"room for {room:,} tokens"]


def _cut(asked: int | None, length: int) -> list[str]:
    """Say where prompts with their answers can be no longer than the cache."""
    if asked is None or length >= asked:
        return []
    return [
        f"a prompt with its answer may have {length:,} tokens, not the {asked:,} of "
        f"--max-model-len: "
        "the cache holds no more (raise --num-gpu-blocks-override or --gpu-memory-utilization)"
    ]


def _counts(args: argparse.Namespace) -> tuple[int, int]:
    """Return how many engines compute prompts only, and how many others there are."""
    flags = ("--replicas", "--prefill-replicas", "--decode-replicas")
    given = {
        flag: parse_count(text, flag)
        for flag in flags
        if (text := getattr(args, flag[2:].replace("-", "_"))) is not None
    }
    for flag, count in given.items():
        if count < 1:
            raise InputError([Problem(flag, "there is no engine", "use 1 or more")])
    if ("--prefill-replicas" in given) != ("--decode-replicas" in given):
        what = "prompts are computed in one place and gone on with in another: both have engines"
        raise InputError(
            [
                Problem(
                    "--prefill-replicas",
                    what,
                    "give --prefill-replicas and --decode-replicas, or neither",
                )
            ]
        )
    if "--prefill-replicas" not in given:
        if args.kv_transfer_backend is not None:
            what = "one engine does all of a request: there is no KV transfer"
            raise InputError(
                [
                    Problem(
                        "--kv-transfer-backend",
                        what,
                        "give --prefill-replicas and --decode-replicas with it",
                    )
                ]
            )
        return 0, given.get("--replicas", 1)
    if "--replicas" in given:
        what = "says how many engines there are, as --prefill-replicas and --decode-replicas do"
        raise InputError([Problem("--replicas", what, "leave it out")])
    from meshwright.run.serve.kv_transfer.handle import KVTransport

    if args.kv_transfer_backend not in (None, *get_args(KVTransport)):
        what = f"{args.kv_transfer_backend!r} is no KV transfer backend"
        raise InputError(
            [Problem("--kv-transfer-backend", what, f"use {' or '.join(get_args(KVTransport))}")]
        )
    if args.kv_transfer_backend == "nixl":
        from meshwright.run.serve.kv_transfer.nixl import load_nixl

        load_nixl()
    return given["--prefill-replicas"], given["--decode-replicas"]


def _check_handing(settings: "EngineConfig") -> None:
    """Raise where engines cannot go on with what others computed."""
    if settings.tensor_parallel_size > 1:
        what = "KV transfer does not support tensor parallelism"
        raise InputError([Problem("--tp", what, "use --replicas, or one GPU for each engine")])
    if settings.num_speculative_tokens or settings.speculative_model:
        flag = "--speculative-model" if settings.speculative_model else "--num-speculative-tokens"
        what = "engines with speculative decoding take no prompts from others"
        raise InputError([Problem(flag, what, "leave it out, or use --replicas")])


def _here(settings: "EngineConfig", path: Path) -> "tuple[EngineClient, list[str]]":
    from meshwright.run.serve.client.thread_client import ThreadEngineClient
    from meshwright.run.serve.engine.startup import start_engine

    begun = start_engine(path, settings)
    cache = begun.engine.runner.kv_cache
    told = format_start_times(begun.startup_s, cache.num_blocks * cache.block_size)
    told += _cut(settings.max_model_len, begun.engine.max_model_len)
    return ThreadEngineClient(begun.engine, begun.lifecycle), told


def _startup_timeout_s(args: argparse.Namespace) -> float:
    from meshwright.run.serve.client.engine_process import START_TIMEOUT_S

    text, flag = args.startup_timeout, "--startup-timeout"
    given = START_TIMEOUT_S if text is None else parse_seconds(text, flag)
    raise_problems(check_number(flag, given, 1, 1e9))
    return given


def _started(
    each: "Sequence[EngineConfig]", path: Path, start_s: float
) -> "list[ProcessEngineClient]":
    """Start engines side by side; where one does not start, none is left."""
    from meshwright.run.serve.client.process_client import ProcessEngineClient

    start = partial(ProcessEngineClient, path, threads=choose_num_threads(each), start_s=start_s)
    with ThreadPoolExecutor(len(each)) as pool:
        starting = [pool.submit(start, settings) for settings in each]
    errors = [error for one in starting if (error := one.exception()) is not None]
    engines = [one.result() for one in starting if one.exception() is None]
    if errors:
        _end(engines)
        raise next((error for error in errors if isinstance(error, MeshwrightError)), errors[0])
    return engines


def _end(engines: "Sequence[ProcessEngineClient]") -> None:
    for engine in engines:
        engine.process.stop()


def _lines(engines: "Sequence[ProcessEngineClient]", settings: "EngineConfig") -> list[str]:
    """Say where the time went of the engine that took longest, and what room all have."""
    slowest = max(
        engines, key=lambda engine: sum(seconds for _, seconds in engine.ready_message.startup_s)
    )
    told = format_start_times(
        slowest.ready_message.startup_s,
        sum(engine.ready_message.kv_cache_tokens for engine in engines),
    )
    told += _cut(settings.max_model_len, min(engine.max_model_len for engine in engines))
    return told if len(engines) == 1 else [f"{len(engines)} engines", *told]
