"""What the topology search finds on known machines."""

import pytest

from meshwright.predict.network.nccl_constants import get_release
from meshwright.predict.network.nccl_graph import NcclGraph, find_graphs, mesh_share, pcie_gbps
from meshwright.predict.network.nccl_tuning import count_comm_channels
from meshwright.predict.network.placement import (
    build_placement,
    build_strided_placement,
    read_cluster_links,
)
from meshwright.spec.catalog import get_cluster, get_gpu
from meshwright.spec.cluster import Cluster, Host, ScaleUpDomain

NCCL = get_release("2.27")


@pytest.mark.parametrize(
    ("name", "ring"),
    [
        ("dgx-a100-80g", NcclGraph(12, 20, 20)),
        ("h100-superpod", NcclGraph(12, 30, 30)),
        ("b200-superpod", NcclGraph(16, 45, 45)),
    ],
)
def test_ring_of_one_node(name: str, ring: NcclGraph) -> None:
    assert find_graphs(build_strided_placement(get_cluster(name), 0, 8), NCCL).ring == ring


def test_ring_between_nodes_has_one_channel_per_card() -> None:
    found = find_graphs(build_strided_placement(get_cluster("h100-superpod"), 0, 16), NCCL)
    assert found.ring == NcclGraph(8, 48, 48)
    assert (
        count_comm_channels(build_strided_placement(get_cluster("h100-superpod"), 0, 16), found)
        == 16
    )


def test_one_node_of_h100_runs_24_channels() -> None:
    place = build_strided_placement(get_cluster("h100-superpod"), 0, 8)
    assert count_comm_channels(place, find_graphs(place, NCCL)) == 24


def test_few_channels_are_split_in_two() -> None:
    place = build_placement(get_cluster("h100-superpod"), [0, 1, 2, 3, 8, 9, 10, 11], sharers=1)
    assert find_graphs(place, NCCL).ring == NcclGraph(8, 24, 24)


def test_cards_of_one_gpu_count_as_one() -> None:
    # p5 has four 100 Gb/s cards per GPU.
    assert find_graphs(
        build_strided_placement(get_cluster("aws-p5"), 0, 32), NCCL
    ).ring == NcclGraph(8, 48, 48)


def test_tree_may_run_faster_inside_than_between() -> None:
    tree = find_graphs(build_strided_placement(get_cluster("aws-p4d"), 0, 16), NCCL).tree
    assert tree == NcclGraph(4, 24, 12)


@pytest.mark.parametrize(
    ("gpus", "nvls"),
    [(4, NcclGraph(4, 60, 60)), (5, NcclGraph(5, 60, 60)), (8, NcclGraph(8, 40, 40))],
)
def test_nvls_heads_take_a_share_more_than_their_peers(gpus: int, nvls: NcclGraph) -> None:
    assert (
        find_graphs(build_strided_placement(get_cluster("h100-superpod"), 0, gpus), NCCL).nvls
        == nvls
    )


def test_ampere_has_no_nvls() -> None:
    assert (
        find_graphs(build_strided_placement(get_cluster("dgx-a100-80g"), 0, 8), NCCL).nvls is None
    )


def test_a_rack_of_72_is_one_unit() -> None:
    place = build_strided_placement(get_cluster("gb200-nvl72"), 0, 72)
    assert place.domains == 1
    assert find_graphs(place, get_release("2.30")).nvls == NcclGraph(32, 20, 20)


def mesh(gpus: int, name: str, links_gbps: float, pair_gbps: float) -> Cluster:
    return Cluster(
        name="mesh",
        title="mesh",
        gpu=get_gpu(name),
        nodes=1,
        gpus_per_node=gpus,
        scale_up=ScaleUpDomain(
            kind="nvlink",
            gpus=gpus,
            gpu_bytes_per_s=links_gbps * 1e9,
            pair_bytes_per_s=pair_gbps * 1e9,
            latency_s=0.6e-6,
        ),
        host=Host(gpu_bytes_per_s=16e9, latency_s=1e-6),
    )


def test_full_mesh_has_a_ring_per_peer() -> None:
    four = read_cluster_links(mesh(4, "a100-40g-sxm", 300, 100))
    assert [mesh_share(four, ranks) for ranks in (2, 3, 4)] == pytest.approx([1 / 3, 2 / 3, 1])


@pytest.mark.parametrize(("ranks", "rings"), [(2, 1), (3, 2), (4, 4), (6, 2), (7, 4), (8, 6)])
def test_cube_mesh_of_v100_has_the_rings_its_wiring_allows(ranks: int, rings: int) -> None:
    eight = read_cluster_links(mesh(8, "v100-32g-sxm", 150, 25))
    assert mesh_share(eight, ranks) * 6 == pytest.approx(rings)


@pytest.mark.parametrize(("wire", "counted"), [(15.75, 12), (31, 24), (63, 48), (121, 96)])
def test_pcie_counts_as_nccl_counts_it(wire: float, counted: float) -> None:
    assert pcie_gbps(wire * 1e9) == pytest.approx(counted, rel=0.02)
