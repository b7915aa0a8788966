"""`mw clusters [NAME]`: the catalog of clusters, or one in full."""

import argparse

from meshwright.cli.flags.topology import add_topology, read_topology
from meshwright.cli.parser import add_common
from meshwright.cli.result import CommandResult, TextView, View, make_fields, make_table
from meshwright.errors import InputError, Problem
from meshwright.spec import catalog
from meshwright.spec.cluster import Cluster
from meshwright.spec.file_formats import dump
from meshwright.spec.job_spec import read_cluster
from meshwright.spec.serialization import encode
from meshwright.spec.units import (
    format_bytes,
    format_quantity,
    format_rate,
    format_seconds,
    parse_count,
)

EXAMPLES = (
    "mw clusters",
    "mw clusters h100-superpod --gpus 1024",
    "mw clusters gb200-nvl72 --as toml > mine.toml",
    "nvidia-smi topo -m > topo.txt; mw clusters --topology topo.txt --gpu h100 --nic 400Gb/s",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="catalog name or TOML file")
    parser.add_argument("--gpus", metavar="N", help="size the cluster for this many GPUs")
    parser.add_argument(
        "--as", dest="form", choices=("toml", "json", "yaml"), help="print the description itself"
    )
    add_topology(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with the list, or with one cluster."""
    if args.name is None and args.topology is None:
        if args.gpus is not None or args.form is not None:
            what = "--gpus and --as need one cluster"
            raise InputError([Problem("", what, "name it: mw clusters NAME")])
        return _list()
    cluster = read_topology(args) if args.topology else read_cluster(args.name)
    if args.gpus is not None:
        cluster = cluster.with_gpus(parse_count(args.gpus, "--gpus"))
    if args.form is not None:
        body = TextView(dump(cluster, f".{args.form}"))
        return CommandResult("cluster/1", {"cluster": encode(cluster)}, (body,), (cluster.name,))
    return _one(cluster)


def _scale_up(cluster: Cluster) -> str:
    links = cluster.scale_up
    return f"{links.kind} ×{links.gpus}, {format_rate(links.gpu_bytes_per_s)}"


def _price(cluster: Cluster) -> str:
    return "" if cluster.price_per_gpu_hour is None else f"${cluster.price_per_gpu_hour:.2f}"


def _list() -> CommandResult:
    clusters = list(catalog.list_clusters().values())
    rows = [
        (cluster.name, cluster.gpu.name, cluster.gpus_per_node, cluster.scale_up.gpus,
         f"{cluster.scale_up.gpu_bytes_per_s / 1e9:g}",
         f"{cluster.nic_bytes_per_s_per_gpu / 1e9:g}" if cluster.nics else "",
         cluster.fabric.kind, _price(cluster).removeprefix("$"))
        for cluster in clusters
    ]  # fmt: skip
    view = make_table(
        "name, gpu, node, domain, link, nic, fabric, $/h", rows,
        "node and domain count GPUs; link and nic are GB/s, $/h dollars, per GPU",
        right="node, domain, link, nic, $/h", wide="gpu",
    )  # fmt: skip
    data = {"clusters": [encode(cluster) for cluster in clusters]}
    return CommandResult("clusters/1", data, (view,), tuple(cluster.name for cluster in clusters))


def _one(cluster: Cluster) -> CommandResult:
    nics, storage = cluster.nics, cluster.storage
    failures = cluster.failures_per_gpu_hour
    head = {
        "name": cluster.name,
        "title": cluster.title,
        "also called": ", ".join(cluster.aliases),
        "devices": f"{cluster.gpus:,} × {cluster.gpu.title}, "
        f"{format_quantity(cluster.nodes, 'node')} of {cluster.gpus_per_node}",
        "scale-up": f"{_scale_up(cluster)} per GPU and direction, "
        f"{format_seconds(cluster.scale_up.latency_s)}",
        "NICs": nics
        and f"{nics.per_node} per node at {format_rate(nics.nic_bytes_per_s)}, "
        f"{nics.rail_count} rails, {format_seconds(nics.latency_s)}",
        "fabric": cluster.fabric.kind + (", rail-optimised" * cluster.fabric.rail_optimised),
        "host": f"{cluster.host.link}, {format_rate(cluster.host.gpu_bytes_per_s)} per GPU"
        + (f", {format_bytes(cluster.host.memory_bytes)} RAM" if cluster.host.memory_bytes else ""),
        "storage": storage and storage.kind,
        "price": _price(cluster) and f"{_price(cluster)} per GPU-hour",
        "failures": failures and f"one per {1 / failures:,.0f} GPU-hours",
        "notes": cluster.notes,
    }
    tiers = [
        (tier.name, "all" if tier.nodes is None else tier.nodes, f"{tier.oversubscription:g} : 1",
         format_seconds(tier.latency_s))
        for tier in cluster.fabric.tiers
    ]  # fmt: skip
    reach = [
        (cluster.tier_between(0, other), f"0 to {other}",
         format_rate(cluster.bandwidth_between(0, other)),
         format_seconds(cluster.latency_between(0, other)))
        for other in _examples(cluster)
    ]  # fmt: skip
    sources = [(", ".join(source.fields), source.text) for source in cluster.sources]
    views: list[View] = [make_fields(head)]
    if tiers:
        views.append(make_table("layer, nodes, oversubscription, latency", tiers))
    if reach:
        views.append(make_table("over, ranks, bandwidth, latency", reach, "between two GPUs"))
    if sources:
        views.append(make_table("figures, source", sources, wide="figures, source"))
    return CommandResult("cluster/1", {"cluster": encode(cluster)}, tuple(views), (cluster.name,))


def _examples(cluster: Cluster) -> list[int]:
    """Pick one rank at each distance from rank 0."""
    found: dict[str, int] = {}
    for step in range(1, cluster.gpus.bit_length() + 1):
        other = min(2**step - 1, cluster.gpus - 1)
        if other > 0:
            found.setdefault(cluster.tier_between(0, other), other)
    return list(found.values())
