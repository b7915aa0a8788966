"""Flags that describe a served model: where it lies, how it is stored, what its engines take."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import msgspec

from meshwright.cli.setting_flags import only_flags_set
from meshwright.errors import InputError, Problem
from meshwright.policy.routing import ROUTINGS
from meshwright.predict.serving.engine import ENGINES, Engine
from meshwright.predict.serving.fleet import Copies, Fleet, default_limits
from meshwright.predict.serving.formats import Formats, KvFormat, WeightFormat
from meshwright.predict.serving.replica import Replica
from meshwright.spec.bounds import require, whole
from meshwright.spec.cluster import Cluster
from meshwright.spec.files import FORMATS
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.names import unknown_name
from meshwright.spec.serving import Mixing
from meshwright.spec.units import format_some, parse_count
from meshwright.spec.work import read_cluster, read_model

ENGINE_NAMES = {engine.name.lower().replace(" ", "-"): engine for engine in ENGINES}
DEGREES = ("tp", "pp", "dp", "ep")


def add_served(parser: argparse.ArgumentParser, *, also: str = "", engine: str = "vllm") -> None:
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
        "--kv", default="bf16", choices=get_args(KvFormat), metavar="WORD",
        help="of keys and values: bf16 or fp8 (default: bf16)",
    )  # fmt: skip
    parser.add_argument(
        "--engine", default=engine if engine in ENGINE_NAMES else None, metavar="NAME",
        help=f"whose overheads and defaults: {', '.join(ENGINE_NAMES)} (default: {engine})",
    )  # fmt: skip
    only_flags_set(parser)


def add_layout(parser: argparse.ArgumentParser) -> None:
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
    for name in DEGREES:
        group.add_argument(
            f"--prefill-{name}", metavar="N",
            help=f"{name} of the engines that compute prompts (default: --{name})",
        )  # fmt: skip
        flags = {f"layout.{name}": f"--{name}", f"prefill.{name}": f"--prefill-{name}"}
        only_flags_set(parser, **flags)
    group.add_argument(
        "--routing", choices=ROUTINGS, default="least-loaded", metavar="WORD",
        help=f"{', '.join(ROUTINGS)} (default: least-loaded)",
    )  # fmt: skip


def add_limits(parser: argparse.ArgumentParser) -> None:
    """Add what an engine takes at a time."""
    group = parser.add_argument_group("limits of an engine (default: the engine's own)")
    group.add_argument("--batch-requests", metavar="N", help="requests that have a place at a time")
    group.add_argument("--batch-tokens", metavar="N", help="tokens of one step")
    group.add_argument("--chunk-tokens", metavar="N", help="tokens of one prompt in one step")
    group.add_argument(
        "--graph-tokens", metavar="N", help="steps with prompts of up to so many tokens are graphs"
    )
    group.add_argument("--block-tokens", metavar="N", help="of the KV cache (default: 16)")
    group.add_argument("--kv-blocks", metavar="N", help="blocks (default: what the memory leaves)")
    group.add_argument(
        "--mixing", choices=get_args(Mixing), metavar="WORD",
        help="prompts in the steps of others (mixed), or in their own (apart)",
    )  # fmt: skip
    group.add_argument(
        "--host-blocks", metavar="N", help="move who makes room to so many blocks of host memory"
    )
    group.add_argument(
        "--no-prefix-cache", action="store_true", help="compute what prompts share again"
    )


def engine_of(args: argparse.Namespace) -> Engine:
    """Return the engine that was named."""
    found = ENGINE_NAMES.get(args.engine.lower())
    if found is None:
        raise InputError([unknown_name("engine", args.engine, list(ENGINE_NAMES), "--engine")])
    return found


def model_of(args: argparse.Namespace) -> Model:
    """Return the model that was named."""
    return read_model(args.model, "MODEL")


def cluster_of(args: argparse.Namespace, gpus: int | None = None) -> Cluster:
    """Return the cluster that was named; one of the catalog has just as many GPUs as are asked."""
    if args.cluster is None:
        fix = "add --cluster h100-superpod, say; mw clusters lists them"
        raise InputError([Problem("--cluster", "on which GPUs?", fix)])
    cluster = read_cluster(args.cluster, "--cluster")
    if gpus is None or Path(args.cluster).suffix in FORMATS:
        return cluster
    return cluster.with_gpus(gpus)


def layout_of(args: argparse.Namespace) -> Layout:
    """Return the layout of one engine."""
    return _laid_out(_degrees(args))


def prefill_layout_of(args: argparse.Namespace) -> Layout:
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
        for name in DEGREES
        if (text := getattr(args, f"{kind}{name}".replace("-", "_"))) is not None
    }


def _laid_out(degrees: dict[str, int]) -> Layout:
    """Return a layout whose GPUs of a stage hold every expert once, as plans have it."""
    tp, dp, ep = (degrees.get(name, 1) for name in ("tp", "dp", "ep"))
    given: dict[str, Any] = degrees
    return Layout(**given, expert_tp=max(1, tp * dp // max(1, ep)))


def limits_given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the limits that flags set."""
    names = (
        "batch_requests", "batch_tokens", "chunk_tokens", "graph_tokens", "block_tokens",
        "kv_blocks", "host_blocks",
    )  # fmt: skip
    found: dict[str, Any] = {
        name: parse_count(getattr(args, name), f"--{name.replace('_', '-')}")
        for name in names
        if getattr(args, name) is not None
    }
    if found.get("host_blocks"):
        found["preemption"] = "swap"
    if args.mixing is not None:
        found["mixing"] = args.mixing
    if args.no_prefix_cache:
        found["prefix_cache"] = False
    return found


def fleet_of(args: argparse.Namespace) -> Fleet:
    """Return the fleet that the flags describe."""
    layout, (before, after), given = layout_of(args), _counts(args), limits_given(args)
    own = _degrees(args, "prefill-")
    if own and not before:
        what = "no engines compute prompts only"
        raise InputError([Problem(f"--prefill-{next(iter(own))}", what, "add --disaggregate 1:1")])
    first = prefill_layout_of(args)
    gpus = before * first.gpus + after * layout.gpus
    replica = Replica(
        model=model_of(args),
        cluster=cluster_of(args, gpus),
        layout=layout,
        formats=Formats(weights=args.precision, kv=args.kv),
        engine=engine_of(args),
    )
    if gpus > replica.cluster.gpus:
        needed = format_some(gpus, "GPU is needed", "GPUs are needed")
        what = f"{needed}, {replica.cluster.name} has {replica.cluster.gpus}"
        raise InputError([Problem("--replicas", what, "use fewer engines or smaller degrees")])

    def copies(one: Replica, count: int) -> Copies:
        return Copies(replica=one, limits=default_limits(one, **given), count=count)

    with _of_prefill():
        other = msgspec.structs.replace(replica, layout=first)
    return Fleet(
        serving=copies(replica, after),
        prefill=copies(other, before) if before else None,
        routing=args.routing,
    )


def _counts(args: argparse.Namespace) -> tuple[int, int]:
    """Return how many engines compute prompts only, and how many others there are."""
    if args.disaggregate is None:
        count = 1 if args.replicas is None else parse_count(args.replicas, "--replicas")
        require(whole("--replicas", count))
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
