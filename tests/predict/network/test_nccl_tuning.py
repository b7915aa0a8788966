"""NCCL's cost model, against what NCCL itself printed and against what users saw it choose."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.predict.network.cost_curve import list_nccl_choices
from meshwright.predict.network.nccl_constants import get_release
from meshwright.predict.network.nccl_graph import find_graphs
from meshwright.predict.network.nccl_tuning import (
    NcclOp,
    TuningEntry,
    build_tuning_table,
    count_comm_channels,
    nccl_us,
)
from meshwright.predict.network.placement import Placement, build_placement
from meshwright.spec.catalog import get_cluster

ROOT = Path(__file__).resolve().parents[3]
LOG: dict[str, dict[str, Any]] = json.loads(
    (ROOT / "validation/collectives/nccl_tuning_h100_2_27_5.json").read_text(encoding="utf-8")
)
PARTS: tuple[tuple[str, str, NcclOp], ...] = (
    ("_H100_AGRS_RING", "ring", "all_gather"),
    ("_H100_AGRS_RING", "ring", "reduce_scatter"),
    ("_H100_AR_RING", "ring", "all_reduce"),
    ("_H100_AR_TREE", "tree", "all_reduce"),
    ("_H100_AR_NVLS_TREE", "nvls_tree", "all_reduce"),
)


def group(nodes: int, per_node: int, name: str = "h100-superpod") -> Placement:
    ranks = [node * 8 + local for node in range(nodes) for local in range(per_node)]
    return build_placement(get_cluster(name), ranks, sharers=1)


def shaped(text: str) -> Placement:
    """Return the group of a shape as the log writes it: nodes x GPUs per node."""
    nodes, per_node = text.split("x")
    return group(int(nodes), int(per_node))


def logged(key: str, algorithm: str, op: NcclOp) -> list[tuple[TuningEntry, float, float]]:
    """Pair our entries with the latency and bandwidth that NCCL 2.27.5 printed."""
    constants, pairs = get_release("2.27.5"), []
    for shape, printed in LOG[key].items():
        place = shaped(shape)
        found = build_tuning_table(op, place, find_graphs(place, constants), constants)
        ours = [entry for entry in found if entry.algorithm == algorithm]
        theirs = [printed] if algorithm == "nvls_tree" else printed
        assert len(ours) == len(theirs), shape
        pairs += [(entry, *values) for entry, values in zip(ours, theirs, strict=True)]
    return pairs


@pytest.mark.parametrize(("key", "algorithm", "op"), PARTS)
def test_entries_equal_the_published_tuning_log(key: str, algorithm: str, op: NcclOp) -> None:
    pairs = logged(key, algorithm, op)
    # The log rounds to 0.1 µs and 0.1 GB/s.
    exact = [
        abs(entry.latency_us - latency) <= 0.1 and abs(entry.algbw_gbps / bandwidth - 1) <= 0.012
        for entry, latency, bandwidth in pairs
    ]
    assert sum(exact) >= 0.95 * len(exact)
    assert all(exact)


@pytest.mark.parametrize("shape", list(LOG["_H100_AR_TREE"]))
def test_choice_is_the_one_the_published_log_implies(shape: str) -> None:
    """The log's own lines, at sizes from 64 B to 4 GiB, have the same least entry as ours."""
    place = shaped(shape)
    constants = get_release("2.27.5")
    found = find_graphs(place, constants)
    channels = count_comm_channels(place, found)
    entries = build_tuning_table("all_reduce", place, found, constants)
    printed = {
        ("ring", protocol): line
        for protocol, line in zip(
            ("ll", "ll128", "simple"), LOG["_H100_AR_RING"][shape], strict=True
        )
    }
    for protocol, line in zip(("ll", "ll128", "simple"), LOG["_H100_AR_TREE"][shape], strict=True):
        printed["tree", protocol] = line
    if shape in LOG["_H100_AR_NVLS_TREE"]:
        printed["nvls_tree", "simple"] = LOG["_H100_AR_NVLS_TREE"][shape]
    for exponent in range(6, 33):
        nbytes = float(1 << exponent)
        times = {
            (entry.algorithm, entry.protocol): nccl_us(
                entry._replace(
                    base_us=printed[entry.algorithm, entry.protocol][0],
                    intra_hops=0,
                    inter_hops=0,
                    algbw_gbps=printed[entry.algorithm, entry.protocol][1],
                ),
                "all_reduce",
                place,
                nbytes,
                channels,
            )
            for entry in entries
        }
        ours = min(entries, key=lambda e: nccl_us(e, "all_reduce", place, nbytes, channels))
        least = min(times.values())
        # Lines that the log's rounding leaves apart by under 1 % count as equal.
        assert times[ours.algorithm, ours.protocol] <= 1.01 * least


def chosen(place: Placement, op: NcclOp, nbytes: float, nccl: str = "2.27") -> tuple[str, str]:
    found = list_nccl_choices(place, op, nccl, False, None)
    entry = [choice.entry for choice in found if choice.start_bytes <= nbytes][-1]
    return entry.algorithm, entry.protocol


def test_eight_h100_take_ring_ll_up_to_a_mebibyte_and_nvls_above() -> None:
    # stas00/ml-engineering read the same from a debug log.
    assert chosen(group(1, 8), "all_reduce", 1 << 20) == ("ring", "ll")
    assert chosen(group(1, 8), "all_reduce", 2 << 20) == ("nvls", "simple")


@pytest.mark.parametrize(
    ("name", "gpus", "algorithm"),
    [
        ("h200-superpod", 4, "ring"),
        ("h200-superpod", 5, "nvls"),
        ("h200-superpod", 8, "nvls"),
        ("b200-superpod", 5, "ring"),
        ("b200-superpod", 8, "nvls"),
    ],
)
def test_large_all_reduce_in_one_node_takes_what_was_seen(
    name: str, gpus: int, algorithm: str
) -> None:
    # stas00/ml-engineering, NCCL 2.27.7, 8 GiB; the newer model decides alike.
    assert chosen(group(1, gpus, name), "all_reduce", 8 << 30, "2.30")[0] == algorithm


def test_choices_are_the_least_estimates_at_every_size() -> None:
    place, constants = group(4, 8), get_release("2.27")
    found = find_graphs(place, constants)
    channels = count_comm_channels(place, found)
    entries = build_tuning_table("all_reduce", place, found, constants)
    for exponent in range(72):
        nbytes = 1.5 * 2 ** (exponent / 2)
        times: dict[tuple[str, str], float] = {
            (e.algorithm, e.protocol): nccl_us(e, "all_reduce", place, nbytes, channels)
            for e in entries
        }
        assert times[chosen(place, "all_reduce", nbytes)] == pytest.approx(min(times.values()))


def test_pat_needs_one_gpu_per_node() -> None:
    constants = get_release("2.27")

    def algorithms(per_node: int) -> set[str]:
        place = group(16, per_node)
        found = build_tuning_table("all_gather", place, find_graphs(place, constants), constants)
        return {entry.algorithm for entry in found}

    assert "pat" in algorithms(1)
    assert "pat" not in algorithms(2)


def test_collnet_is_considered_only_where_enabled() -> None:
    place, constants = group(4, 8), get_release("2.27")
    found = find_graphs(place, constants)
    names = {
        e.algorithm for e in build_tuning_table("all_reduce", place, found, constants, collnet=True)
    }
    assert {"collnet_direct", "collnet_chain", "nvls"} <= names
    assert not names & {"pat"}
    plain = {e.algorithm for e in build_tuning_table("all_reduce", place, found, constants)}
    assert plain == {"ring", "tree", "nvls_tree"}


def test_broadcast_and_reduce_have_only_rings() -> None:
    place, constants = group(2, 8), get_release("2.27")
    for op in ("broadcast", "reduce"):
        found = build_tuning_table(op, place, find_graphs(place, constants), constants)
        assert {entry.algorithm for entry in found} == {"ring"}


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("2.12.10", "2.19"),
        ("2.22.3", "2.21"),
        ("2.27.5", "2.23"),
        ("2.28.9", "2.28"),
        ("3.1", "2.30"),
    ],
)
def test_version_takes_the_newest_table_up_to_it(asked: str, given: str) -> None:
    assert get_release(asked).version == given


def test_later_table_keeps_what_it_does_not_state() -> None:
    old, new = get_release("2.29"), get_release("2.30")
    assert new.net_us == old.net_us
    assert new.caps.nvls_tree[3][2] == 80.0
    assert old.caps.nvls_tree[3][2] == 43.8
