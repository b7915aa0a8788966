"""Hold NCCL's cost model, as we restate it, against a tuning log that NCCL printed.

The log is JSON as `validation/collectives/nccl_tuning_h100_2_27_5.json` has it: per part (a
collective with an algorithm) and shape (`2x8`: nodes and GPUs per node of H100), the latency in µs
and the bandwidth in GB/s of LL, LL128 and Simple.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.network import NcclOp, Placement, build_placement
from meshwright.predict.network.nccl_constants import get_release
from meshwright.predict.network.nccl_graph import find_graphs
from meshwright.predict.network.nccl_tuning import build_tuning_table
from meshwright.spec.catalog import get_cluster
from meshwright.spec.file_formats import read_text

CLUSTER, NCCL = "h100-superpod", "2.27.5"
# The log rounds to 0.1 µs and to 0.1 GB/s, which is 1.2 % of its smallest bandwidths.
EXACT_US, EXACT_SHARE = 0.1, 0.012
PARTS: dict[str, tuple[str, tuple[NcclOp, ...]]] = {
    "_H100_AGRS_RING": ("ring", ("all_gather", "reduce_scatter")),
    "_H100_AR_RING": ("ring", ("all_reduce",)),
    "_H100_AR_TREE": ("tree", ("all_reduce",)),
    "_H100_AR_NVLS_TREE": ("nvls_tree", ("all_reduce",)),
}
"""What the log's parts hold: an algorithm and the collectives it was printed for."""


class TuningComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the log, which is one shape of one part, beside ours."""

    part: str
    shape: str
    exact: bool
    """Whether every latency and bandwidth of the entry is ours, as far as the log rounds."""
    worst_us: float
    """The largest difference of a latency."""
    worst_share: float
    """The largest relative difference of a bandwidth."""


def read_tuning_log(path: str | Path) -> dict[str, dict[str, Any]]:
    """Read a tuning log; every fault names the place."""
    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        what = f"is not valid JSON: {error}"
        raise InputError([Problem(str(path), what, "give a tuning log as JSON")]) from None
    parts = data if isinstance(data, dict) else {}
    found = {name: part for name, part in parts.items() if name in PARTS}
    if not found or not all(isinstance(part, dict) for part in found.values()):
        fix = f"give one or more of {', '.join(PARTS)}, each an object of shapes such as 2x8"
        raise InputError([Problem(str(path), "is no tuning log", fix)])
    return found


def compare_tuning_log(log: Mapping[str, Mapping[str, Any]]) -> list[TuningComparison]:
    """Return every entry of a log beside ours."""
    return [
        _compared(part, shape, printed)
        for part, shapes in log.items()
        for shape, printed in shapes.items()
    ]


def _compared(part: str, shape: str, printed: Any) -> TuningComparison:
    algorithm, ops = PARTS[part]
    theirs = list(_lines(part, shape, printed))
    place, constants = parse_shape(shape), get_release(NCCL)
    late, off = 0.0, 0.0
    for op in ops:
        found = build_tuning_table(op, place, find_graphs(place, constants), constants)
        ours = [entry for entry in found if entry.algorithm == algorithm]
        if len(ours) != len(theirs):
            return TuningComparison(
                part=part, shape=shape, exact=False, worst_us=0.0, worst_share=0.0
            )
        for entry, (latency_us, gbps) in zip(ours, theirs, strict=True):
            late = max(late, abs(entry.latency_us - latency_us))
            off = max(off, abs(entry.algbw_gbps / gbps - 1))
    exact = late <= EXACT_US + 1e-9 and off <= EXACT_SHARE
    return TuningComparison(part=part, shape=shape, exact=exact, worst_us=late, worst_share=off)


def _lines(part: str, shape: str, printed: Any) -> Iterator[tuple[float, float]]:
    """Yield latency and bandwidth per protocol; a part with one protocol states its pair alone."""
    pairs = printed
    if isinstance(printed, list) and printed and not isinstance(printed[0], list):
        pairs = [printed]
    try:
        for latency_us, gbps in pairs:
            if not gbps > 0:
                raise ValueError
            yield float(latency_us), float(gbps)
    except (TypeError, ValueError):
        what = f"{printed!r:.60} is no list of [latency_us, GB/s]"
        where, fix = f"{part}.{shape}", "write one pair per protocol"
        raise InputError([Problem(where, what, fix)]) from None


def parse_shape(text: str) -> Placement:
    """Return the group of a shape as the log writes it: nodes x GPUs per node."""
    nodes, _, per_node = text.partition("x")
    whole = get_cluster(CLUSTER)
    room = nodes.isdigit() and per_node.isdigit() and 0 < int(per_node) <= whole.gpus_per_node
    if not room or not 0 < int(nodes) <= whole.nodes:
        fix = f"write nodes x GPUs per node, up to {whole.nodes}x{whole.gpus_per_node}"
        raise InputError([Problem("shape", f"{text!r} is no shape of {CLUSTER}", fix)])
    each = whole.gpus_per_node
    ranks = [node * each + local for node in range(int(nodes)) for local in range(int(per_node))]
    return build_placement(whole, ranks, sharers=1)
