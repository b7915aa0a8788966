"""A row's own words become a cluster and a group."""

from typing import Any

import pytest

from meshwright.predict.validation.collectives import read_system
from meshwright.predict.validation.collectives.row_fields import UnreadableRowError


def row(**changes: object) -> dict[str, Any]:
    plain: dict[str, Any] = {
        "gpu": "H100 80GB HBM3",
        "nodes": 2,
        "gpus": 16,
        "gpus_per_node": 8,
        "intra": "NVLink4 (H100/H200 NVSwitch)",
        "inter": "8x400Gb/s NDR IB",
    }
    return {**plain, **changes}


@pytest.mark.parametrize(
    ("inter", "cards", "gbit", "kind"),
    [
        ("8x400Gb/s NDR IB", 8, 400, "infiniband"),
        ("32x100Gb/s EFA (3200Gb/s)", 32, 100, "efa"),
        ("8x2x400Gb/s RoCE (6.4Tb/s)", 16, 400, "roce"),
        ("8x dual-port 200Gb/s CX-7 RoCE", 16, 200, "roce"),
        ("1.6Tb/s TCPXO", 8, 200, "ethernet"),
        ("2x200Gb/s Slingshot", 2, 200, "slingshot"),
        ("8x100Gb/s Ethernet", 8, 100, "ethernet"),
    ],
)
def test_network_is_read_from_a_rows_words(inter: str, cards: int, gbit: float, kind: str) -> None:
    found = read_system(row(inter=inter))
    assert found.cluster.nics is not None
    assert found.cluster.nics.per_node == cards
    assert found.cluster.nics.nic_bytes_per_s == pytest.approx(gbit * 1e9 / 8)
    assert found.cluster.fabric.kind == kind
    assert found.assumed == ()


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ({"inter": "2x200Gb/s Slingshot", "note": "env1 default (TCP)"}, "sockets"),
        ({"inter": "8x100Gb/s Ethernet"}, "sockets"),
        ({"inter": "8x200Gb/s GPUDirect-TCPXO"}, "ethernet"),
        ({"inter": "2x200Gb/s Slingshot"}, "slingshot"),
    ],
)
def test_plain_tcp_goes_through_sockets_whatever_the_wires(
    words: dict[str, str], kind: str
) -> None:
    assert read_system(row(**words)).placement.links.fabric == kind


def test_what_is_not_stated_is_said_to_be_assumed() -> None:
    assert read_system(row(inter="InfiniBand (not stated)")).assumed == ("400 Gb/s per GPU",)
    assert read_system(row(inter="1x400Gb/s per GPU")).assumed == ("InfiniBand",)
    assert read_system(row(inter=None)).assumed == ("InfiniBand", "400 Gb/s per GPU")


@pytest.mark.parametrize(
    "changes", [{"gpus": None}, {"nodes": None}, {"gpus_per_node": None}, {"gpus": 16.0}]
)
def test_two_of_three_counts_are_enough(changes: dict[str, object]) -> None:
    assert read_system(row(**changes)).placement == read_system(row()).placement


def test_racks_are_units_where_nvlink_spans_them() -> None:
    words = {"gpu": "GB200", "nodes": 36, "gpus": 144, "gpus_per_node": 4, "intra": "NVLink5 NVL72"}
    place = read_system(row(**words, inter="IB")).placement
    assert (place.domains, place.ranks_per_domain) == (2, 72)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": None}, "does not name its GPU"),
        ({"gpu": "TPU v9"}, "catalog has no GPU TPU v9"),
        ({"gpus": None, "nodes": None}, "how many"),
        ({"gpus": 3, "nodes": 5}, "3 GPUs cannot be on 5 nodes"),
        ({"gpus": 1, "nodes": 1}, "single GPU"),
        ({"gpus": "many"}, "gpus is 'many'"),
        ({"nodes": 10**12}, "nodes is 1000000000000"),
        ({"inter": "8x0Gb/s IB"}, "no possible cluster"),
    ],
)
def test_row_that_describes_no_cluster_says_why(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(UnreadableRowError, match=reason):
        read_system(row(**changes))
