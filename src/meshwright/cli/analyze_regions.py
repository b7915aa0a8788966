"""The annotated regions of a run as plain data: means over ranks, in ms per step."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from meshwright.observe.analyze.regions import Region
from meshwright.observe.analyze.summary import RankSummary


def regions_data(ranks: Sequence[RankSummary]) -> list[dict[str, Any]]:
    """One row for each path of annotations: the longest first, each with those inside it."""
    rows: dict[tuple[str, ...], list[tuple[RankSummary, Region]]] = defaultdict(list)
    for one in ranks:
        for region in one.regions.regions:
            rows[region.path].append((one, region))
    device = sum(one.per_step_ms(one.regions.device_ns) for one in ranks)
    found: list[dict[str, Any]] = []
    for path, own in rows.items():

        def mean(name: str, own: list[tuple[RankSummary, Region]] = own) -> float:
            total = sum(one.per_step_ms(getattr(region, name)) for one, region in own)
            return total / len(ranks)

        most = max(own, key=lambda item: item[1].total_ns)[1]
        found.append({
            "path": list(path),
            "ms_per_step": mean("total_ns"),
            "own_ms_per_step": mean("own_ns"),
            "communication_ms_per_step": mean("communication_ns"),
            "host_ms_per_step": mean("host_ns"),
            "share": mean("total_ns") * len(ranks) / device if device else 0.0,
            "calls_per_step": 1e6 * mean("num_calls"),
            "kernels_per_step": 1e6 * mean("num_kernels"),
            "kernels": [
                {"name": name, "launches": count, "ms": ns / 1e6}
                for name, count, ns in most.kernels
            ],
        })  # fmt: skip
    longest = {tuple(row["path"]): -row["ms_per_step"] for row in found}
    return sorted(found, key=lambda row: _place(tuple(row["path"]), longest))


def _place(path: tuple[str, ...], rank: dict[tuple[str, ...], float]) -> list[tuple[float, str]]:
    """Where a path stands: behind the region around it, the longest of those first."""
    ends = range(1, len(path) + 1)
    return [(rank.get(path[:end], 0.0), path[end - 1]) for end in ends]
