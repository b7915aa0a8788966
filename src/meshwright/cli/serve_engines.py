"""The engines behind `mw serve`: one, several that share the asks, or two kinds that share each."""

import argparse
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import msgspec

from meshwright.cli.engine_flags import settings_of
from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.policy.routing import ROUTINGS
from meshwright.spec.bounds import real, require
from meshwright.spec.units import format_some, parse_count, parse_seconds

if TYPE_CHECKING:
    from meshwright.run.serve.engine.settings import EngineSettings
    from meshwright.run.serve.interface import Serves
    from meshwright.run.serve.worker.remote import RemoteEngine


def add_engines(parser: argparse.ArgumentParser) -> None:
    """Add how many engines there are, and what each of them does."""
    group = parser.add_argument_group("several engines")
    group.add_argument("--replicas", metavar="N", help="engines that share the requests")
    group.add_argument(
        "--routing", choices=ROUTINGS, default="prefix", metavar="WORD",
        help=f"who gets a request: {', '.join(ROUTINGS)} (default prefix)",
    )  # fmt: skip
    group.add_argument("--prefill", metavar="N", help="engines that compute prompts only")
    group.add_argument("--decode", metavar="N", help="engines that go on with those prompts")
    group.add_argument(
        "--parcels", metavar="WAY",
        help="how keys and values get there: shm (shared memory, the default), tcp or nixl",
    )  # fmt: skip
    group.add_argument(
        "--start-s", metavar="S", help="the longest an engine may take to start (default 1800)"
    )
    group.add_argument(
        "--in-process", action="store_true", help="run the one engine in the server's own process"
    )


def start_engines(args: argparse.Namespace, path: Path) -> "tuple[Serves, list[str]]":
    """Start what the flags describe; return it with where the time of the start went."""
    first, then = _counts(args)
    settings = settings_of(args)
    start_s = _start_s(args)
    if args.in_process:
        if first + then > 1:
            what = "only one engine fits into the server's process"
            raise InputError([Problem("--in-process", what, "leave it out")])
        return _here(settings, path)
    if first + then == 1:
        engines = _started([settings], path, start_s)
        return engines[0], _lines(engines, settings)
    from meshwright.run.serve.routed import HandedOver, Routed

    if first:
        _check_handing(settings)
        settings = msgspec.structs.replace(settings, parcels=args.parcels or "shm")
    engines = _started(dealt(settings, first + then), path, start_s)
    block = settings.limits.block_tokens
    shared = {
        "block_tokens": block,
        "kept_blocks": max(1, min(engine.ready.room for engine in engines) // block),
    }
    if not first:
        routed = Routed(engines, args.routing, weights=str(path), **shared)
        return routed, _lines(engines, settings)
    if not all(engine.ready.hands_over for engine in engines):
        _end(engines)
        what = "this model has states beside keys and values, which are not handed over"
        raise InputError([Problem("--prefill", what, "use --replicas")])
    both = HandedOver(engines[:first], engines[first:], args.routing, weights=str(path), **shared)
    return both, _lines(engines, settings)


def dealt(settings: "EngineSettings", count: int) -> "list[EngineSettings]":
    """Return the settings of so many engines, each with GPUs of its own where there are some."""
    import torch

    from meshwright.run.serve.engine.build import device_of

    device = device_of(settings.device)
    if device.type != "cuda":
        return [settings] * count
    begin, there = device.index or 0, torch.cuda.device_count()
    if (needed := begin + count * settings.tp) > there:
        each = format_some(settings.tp, "GPU")
        what = f"{count} engines of {each} from cuda:{begin} on need {needed}"
        raise InputError([Problem("engines", f"{what}, torch sees {there}", "start fewer")])
    return [
        msgspec.structs.replace(settings, device=f"cuda:{begin + number * settings.tp}")
        for number in range(count)
    ]


def threads_of(each: "Sequence[EngineSettings]") -> int | None:
    """Return with how many threads each of some engines computes; None leaves it to torch.

    Engines that all have as many as there are cores wait for each other: answers of a small model
    took nine times as long.
    """
    import torch

    from meshwright.run.serve.engine.build import device_of

    if len(each) == 1 or device_of(each[0].device).type != "cpu":
        return None
    return max(1, torch.get_num_threads() // len(each))


def start_lines(took: Iterable[tuple[str, float]], room: int) -> list[str]:
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
        f"a prompt with its answer may have {length:,} tokens, not the {asked:,} of --max-length: "
        "the cache holds no more (raise --kv-blocks or --memory-share)"
    ]


def _counts(args: argparse.Namespace) -> tuple[int, int]:
    """Return how many engines compute prompts only, and how many others there are."""
    given = {
        name: parse_count(text, f"--{name}")
        for name in ("replicas", "prefill", "decode")
        if (text := getattr(args, name)) is not None
    }
    for name, count in given.items():
        if count < 1:
            raise InputError([Problem(f"--{name}", "there is no engine", "use 1 or more")])
    if ("prefill" in given) != ("decode" in given):
        what = "prompts are computed in one place and gone on with in another: both have engines"
        raise InputError([Problem("--prefill", what, "give --prefill and --decode, or neither")])
    if "prefill" not in given:
        if args.parcels is not None:
            what = "one engine does all of a request, and no keys and values travel"
            raise InputError([Problem("--parcels", what, "give --prefill and --decode with it")])
        return 0, given.get("replicas", 1)
    if "replicas" in given:
        what = "says how many engines there are, as --prefill and --decode do"
        raise InputError([Problem("--replicas", what, "leave it out")])
    from meshwright.run.serve.parcels import Way

    if args.parcels not in (None, *get_args(Way)):
        what = f"{args.parcels!r} is no way"
        raise InputError([Problem("--parcels", what, f"use {' or '.join(get_args(Way))}")])
    if args.parcels == "nixl":
        from meshwright.run.serve.nixl_parcels import load_nixl

        load_nixl()
    return given["prefill"], given["decode"]


def _check_handing(settings: "EngineSettings") -> None:
    """Raise where engines cannot go on with what others computed."""
    if settings.tp > 1:
        what = "keys and values that several GPUs share are not handed over"
        raise InputError([Problem("--tp", what, "use --replicas, or one GPU for each engine")])
    if settings.guesses or settings.draft:
        flag = "--draft" if settings.draft else "--guesses"
        what = "engines that guess take no prompts from others"
        raise InputError([Problem(flag, what, "leave it out, or use --replicas")])


def _here(settings: "EngineSettings", path: Path) -> "tuple[Serves, list[str]]":
    from meshwright.run.serve.engine.loop import EngineLoop
    from meshwright.run.serve.engine.start import start_engine

    begun = start_engine(path, settings)
    cache = begun.engine.runner.cache
    told = start_lines(begun.took, cache.blocks * cache.block_tokens)
    told += _cut(settings.max_length, begun.engine.max_length)
    return EngineLoop(begun.engine, begun.upkeep), told


def _start_s(args: argparse.Namespace) -> float:
    from meshwright.run.serve.worker.launch import START_S

    given = START_S if args.start_s is None else parse_seconds(args.start_s, "--start-s")
    require(real("--start-s", given, 1, 1e9))
    return given


def _started(each: "Sequence[EngineSettings]", path: Path, start_s: float) -> "list[RemoteEngine]":
    """Start engines side by side; where one does not start, none is left."""
    from meshwright.run.serve.worker.remote import RemoteEngine

    start = partial(RemoteEngine, path, threads=threads_of(each), start_s=start_s)
    with ThreadPoolExecutor(len(each)) as pool:
        starting = [pool.submit(start, settings) for settings in each]
    errors = [error for one in starting if (error := one.exception()) is not None]
    engines = [one.result() for one in starting if one.exception() is None]
    if errors:
        _end(engines)
        raise next((error for error in errors if isinstance(error, MeshwrightError)), errors[0])
    return engines


def _end(engines: "Sequence[RemoteEngine]") -> None:
    for engine in engines:
        engine.process.end()


def _lines(engines: "Sequence[RemoteEngine]", settings: "EngineSettings") -> list[str]:
    """Say where the time went of the engine that took longest, and what room all have."""
    slowest = max(engines, key=lambda engine: sum(seconds for _, seconds in engine.ready.took))
    told = start_lines(slowest.ready.took, sum(engine.ready.room for engine in engines))
    told += _cut(settings.max_length, min(engine.max_length for engine in engines))
    return told if len(engines) == 1 else [f"{len(engines)} engines", *told]
