"""Flags that describe a served model: where it lies, how it is stored, what its engines take."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import msgspec

from meshwright.cli.flags.problems import declare_flag_names
from meshwright.errors import InputError, Problem
from meshwright.policy.serving.router import ROUTING_POLICIES
from meshwright.predict.serving.cost.quantization import KvFormat, Quantization, WeightFormat
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.cost.serving_engine import ENGINES, ServingEngine
from meshwright.predict.serving.sim.serving_fleet import (
    ReplicaPool,
    ServingFleet,
    default_scheduler_config,
)
from meshwright.spec.cluster import Cluster
from meshwright.spec.field_checks import check_integer, raise_problems
from meshwright.spec.file_formats import FORMATS
from meshwright.spec.job_spec import read_cluster, read_model
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.units import format_quantity, parse_count

ENGINE_NAMES = {engine.name.lower().replace(" ", "-"): engine for engine in ENGINES}
PARALLEL_DEGREES = ("tp", "pp", "dp", "ep")
_COUNTS = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "long_prefill_token_threshold": "long_prefill_token_threshold",
    "max_cudagraph_capture_size": "max_cudagraph_capture_size",
    "block_size": "block_size",
    "num_gpu_blocks_override": "num_gpu_blocks",
    "num_cpu_blocks": "num_cpu_blocks",
}
"""Fields of `SchedulerConfig` by the flags that set them."""


def add_served_model(
    parser: argparse.ArgumentParser, *, also: str = "", engine: str = "vllm"
) -> None:
    """Add what is served, and on what.

    `also` says what else may stand for the model, `engine` whose times count where nobody says.
    """
    known = "catalog name, TOML file, or a folder"
    parser.add_argument("model", metavar="MODEL", help=f"{known}{also}")
    parser.add_argument("--cluster", metavar="NAME", help="catalog name or TOML file")
    parser.add_argument(
        "--precision", default="bf16", choices=get_args(WeightFormat), metavar="WORD",
        help=f"of the weights: {', '.join(get_args(WeightFormat))} (default: bf16)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-cache-dtype", default="bf16", choices=get_args(KvFormat), metavar="WORD",
        help="of keys and values: bf16 or fp8 (default: bf16)",
    )  # fmt: skip
    parser.add_argument(
        "--engine", default=engine if engine in ENGINE_NAMES else None, metavar="NAME",
        help=f"whose overheads and defaults: {', '.join(ENGINE_NAMES)} (default: {engine})",
    )  # fmt: skip
    declare_flag_names(parser)


def add_engine_layout(parser: argparse.ArgumentParser) -> None:
    """Add how copies of the model lie on GPUs."""
    group = parser.add_argument_group("engines")
    group.add_argument("--tp", metavar="N", help="GPUs that share every product (default: 1)")
    group.add_argument("--pp", metavar="N", help="pipeline stages (default: 1)")
    group.add_argument(
        "--dp", metavar="N", help="attention groups of one engine, with requests of their own"
    )
    group.add_argument(
        "--ep", metavar="N",
        help="groups over which experts are spread (default: 1, each cut over tp × dp GPUs)",
    )  # fmt: skip
    group.add_argument("--replicas", metavar="N", help="engines behind a router (default: 1)")
    group.add_argument(
        "--disaggregate", metavar="P:D",
        help="P engines compute prompts, D others decode; keys and values travel",
    )  # fmt: skip
    for name in PARALLEL_DEGREES:
        group.add_argument(
            f"--prefill-{name}", metavar="N",
            help=f"{name} of the engines that compute prompts (default: --{name})",
        )  # fmt: skip
        flags = {f"layout.{name}": f"--{name}", f"prefill.{name}": f"--prefill-{name}"}
        declare_flag_names(parser, **flags)
    group.add_argument(
        "--routing", choices=ROUTING_POLICIES, default="least-loaded", metavar="WORD",
        help=f"{', '.join(ROUTING_POLICIES)} (default: least-loaded)",
    )  # fmt: skip


def add_scheduler_limits(parser: argparse.ArgumentParser) -> None:
    """Add what an engine takes at a time."""
    group = parser.add_argument_group("limits of an engine (default: the engine's own)")
    group.add_argument("--max-num-seqs", metavar="N", help="requests that have a place at a time")
    group.add_argument("--max-num-batched-tokens", metavar="N", help="tokens of one step")
    group.add_argument(
        "--long-prefill-token-threshold", metavar="N", help="tokens of one prompt in one step"
    )
    group.add_argument(
        "--max-cudagraph-capture-size", metavar="N",
        help="steps with prompts of up to so many tokens are graphs",
    )  # fmt: skip
    group.add_argument("--block-size", metavar="N", help="tokens of a cache block (default: 16)")
    group.add_argument(
        "--num-gpu-blocks-override",
        metavar="N",
        help="cache blocks (default: what the memory leaves)",
    )
    group.add_argument(
        "--enable-chunked-prefill", action=argparse.BooleanOptionalAction,
        help="compute parts of prompts in the steps of decoding requests, or prompts in their own",
    )  # fmt: skip
    group.add_argument(
        "--num-cpu-blocks", metavar="N",
        help="swap preempted requests to so many blocks of host memory",
    )  # fmt: skip
    group.add_argument(
        "--no-enable-prefix-caching", action="store_true", help="compute shared prefixes again"
    )
    declare_flag_names(parser, num_gpu_blocks="--num-gpu-blocks-override")


def find_engine(args: argparse.Namespace) -> ServingEngine:
    """Return the engine that was named."""
    found = ENGINE_NAMES.get(args.engine.lower())
    if found is None:
        raise InputError(
            [build_unknown_name_problem("engine", args.engine, list(ENGINE_NAMES), "--engine")]
        )
    return found


def read_served_model(args: argparse.Namespace) -> Model:
    """Return the model that was named."""
    return read_model(args.model, "MODEL")


def read_served_cluster(args: argparse.Namespace, gpus: int | None = None) -> Cluster:
    """Return the cluster that was named; one of the catalog has just as many GPUs as are asked."""
    if args.cluster is None:
        fix = "add --cluster h100-superpod, say; mw clusters lists them"
        raise InputError([Problem("--cluster", "on which GPUs?", fix)])
    cluster = read_cluster(args.cluster, "--cluster")
    if gpus is None or Path(args.cluster).suffix in FORMATS:
        return cluster
    return cluster.with_gpus(gpus)


def read_engine_layout(args: argparse.Namespace) -> Layout:
    """Return the layout of one engine."""
    return _laid_out(_degrees(args))


def read_prefill_layout(args: argparse.Namespace) -> Layout:
    """Return the layout of one engine that computes prompts: the other's, where nothing is said."""
    with _of_prefill():
        return _laid_out(_degrees(args) | _degrees(args, "prefill-"))


@contextmanager
def _of_prefill() -> Iterator[None]:
    """Tell problems of a layout as those of engines that compute prompts."""
    try:
        yield
    except InputError as error:
        named = (f"prefill.{one.where.removeprefix('layout.')}" for one in error.problems)
        pairs = zip(error.problems, named, strict=True)
        raise InputError(one._replace(where=where) for one, where in pairs) from None


def _degrees(args: argparse.Namespace, kind: str = "") -> dict[str, int]:
    """Return the degrees that flags set."""
    return {
        name: parse_count(text, f"--{kind}{name}")
        for name in PARALLEL_DEGREES
        if (text := getattr(args, f"{kind}{name}".replace("-", "_"))) is not None
    }


def _laid_out(degrees: dict[str, int]) -> Layout:
    """Return a layout whose GPUs of a stage hold every expert once, as plans have it."""
    tp, dp, ep = (degrees.get(name, 1) for name in ("tp", "dp", "ep"))
    given: dict[str, Any] = degrees
    return Layout(**given, expert_tp=max(1, tp * dp // max(1, ep)))


def read_limits(args: argparse.Namespace) -> dict[str, Any]:
    """Return the limits that flags set."""
    found: dict[str, Any] = {
        field: parse_count(getattr(args, name), f"--{name.replace('_', '-')}")
        for name, field in _COUNTS.items()
        if getattr(args, name) is not None
    }
    if found.get("num_cpu_blocks"):
        found["preemption_mode"] = "swap"
    if args.enable_chunked_prefill is not None:
        found["enable_chunked_prefill"] = args.enable_chunked_prefill
    if args.no_enable_prefix_caching:
        found["enable_prefix_caching"] = False
    return found


def read_deployment(args: argparse.Namespace) -> ServingFleet:
    """Return the fleet that the flags describe."""
    layout, (before, after), given = read_engine_layout(args), _counts(args), read_limits(args)
    own = _degrees(args, "prefill-")
    if own and not before:
        what = "no engines compute prompts only"
        raise InputError([Problem(f"--prefill-{next(iter(own))}", what, "add --disaggregate 1:1")])
    first = read_prefill_layout(args)
    gpus = before * first.gpus + after * layout.gpus
    replica = Replica(
        model=read_served_model(args),
        cluster=read_served_cluster(args, gpus),
        layout=layout,
        quantization=Quantization(weights=args.precision, kv=args.kv_cache_dtype),
        engine=find_engine(args),
    )
    if gpus > replica.cluster.gpus:
        needed = format_quantity(gpus, "GPU is needed", "GPUs are needed")
        what = f"{needed}, {replica.cluster.name} has {replica.cluster.gpus}"
        raise InputError([Problem("--replicas", what, "use fewer engines or smaller degrees")])

    def copies(one: Replica, count: int) -> ReplicaPool:
        return ReplicaPool(
            replica=one, scheduler_config=default_scheduler_config(one, **given), count=count
        )

    with _of_prefill():
        other = msgspec.structs.replace(replica, layout=first)
    return ServingFleet(
        serving_pool=copies(replica, after),
        prefill_pool=copies(other, before) if before else None,
        routing=args.routing,
    )


def _counts(args: argparse.Namespace) -> tuple[int, int]:
    """Return how many engines compute prompts only, and how many others there are."""
    if args.disaggregate is None:
        count = 1 if args.replicas is None else parse_count(args.replicas, "--replicas")
        raise_problems(check_integer("--replicas", count))
        return 0, count
    if args.replicas is not None:
        what = "says how many engines there are, as --disaggregate does"
        raise InputError([Problem("--replicas", what, "give one of them")])
    before, colon, after = args.disaggregate.partition(":")
    if not colon:
        fix = "write 2:1 for two engines that compute prompts and one that decodes"
        raise InputError([Problem("--disaggregate", f"{args.disaggregate!r} is no split", fix)])
    found = parse_count(before, "--disaggregate"), parse_count(after, "--disaggregate")
    if min(found) < 1:
        raise InputError([Problem("--disaggregate", "one side has no engine", "use 1:1 or more")])
    return found
