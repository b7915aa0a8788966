import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.catalog import list_clusters
from meshwright.spec.cluster import (
    Cluster,
    Fabric,
    Host,
    Nics,
    ScaleUpDomain,
    SpecSource,
    SwitchTier,
)

NAMES = sorted(list_clusters())


def test_ranks_count_gpus_node_by_node(fat_tree: Cluster) -> None:
    assert fat_tree.gpus == 512
    assert [fat_tree.node_of(rank) for rank in (0, 7, 8, 511)] == [0, 0, 1, 63]
    assert [fat_tree.rail_of(rank) for rank in (0, 7, 8, 13)] == [0, 7, 0, 5]
    assert fat_tree.domain_of(8) == 1


def test_two_cards_per_gpu_still_give_each_gpu_its_rail(fat_tree: Cluster) -> None:
    twice = msgspec.structs.replace(
        fat_tree, nics=Nics(per_node=16, nic_bytes_per_s=24e9, latency_s=0, rails=16)
    )
    assert [twice.rail_of(rank) for rank in range(8)] == [0, 2, 4, 6, 8, 10, 12, 14]


def test_gpus_that_share_a_card_share_a_rail(fat_tree: Cluster) -> None:
    shared = msgspec.structs.replace(
        fat_tree, nics=Nics(per_node=4, nic_bytes_per_s=48e9, latency_s=0)
    )
    assert [shared.rail_of(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_distance_grows_from_the_domain_to_the_core(fat_tree: Cluster) -> None:
    others = {"same": 0, "scale-up": 1, "leaf": 8, "spine": 4 * 8, "core": 16 * 8}
    for tier, other in others.items():
        assert fat_tree.tier_between(0, other) == tier
    latencies = [fat_tree.latency_between(0, other) for other in others.values()]
    assert latencies == sorted(latencies)
    assert [fat_tree.hops_between(0, other) for other in others.values()] == [0, 1, 1, 3, 5]


def test_oversubscription_multiplies_on_the_way_up(fat_tree: Cluster) -> None:
    assert fat_tree.bandwidth_between(0, 1) == 450e9
    assert fat_tree.bandwidth_between(0, 8) == 48e9
    assert fat_tree.bandwidth_between(0, 32) == 24e9
    assert fat_tree.bandwidth_between(0, 128) == 8e9


def test_another_rail_is_reached_through_the_domain(fat_tree: Cluster) -> None:
    assert fat_tree.tier_between(0, 9) == "leaf"
    extra = fat_tree.latency_between(0, 9) - fat_tree.latency_between(0, 8)
    assert extra == pytest.approx(fat_tree.scale_up.latency_s)


def test_without_fast_links_another_rail_is_a_layer_further(fat_tree: Cluster) -> None:
    alone = msgspec.structs.replace(fat_tree.scale_up, gpus=1, switched=False)
    cluster = msgspec.structs.replace(fat_tree, scale_up=alone)
    assert cluster.tier_between(0, 8) == "leaf"
    assert cluster.tier_between(0, 9) == "spine"


def test_cards_shared_by_gpus_are_shared_in_bandwidth(fat_tree: Cluster) -> None:
    half = Nics(per_node=4, nic_bytes_per_s=12.5e9, latency_s=0)
    cluster = msgspec.structs.replace(fat_tree, nics=half)
    assert cluster.nic_bytes_per_s_per_gpu == 6.25e9
    assert cluster.bandwidth_between(0, 8) == 6.25e9


def test_pcie_limits_what_a_fast_card_gives(fat_tree: Cluster) -> None:
    slow = Host(gpu_bytes_per_s=10e9, latency_s=0)
    assert msgspec.structs.replace(fat_tree, host=slow).bandwidth_between(0, 8) == 10e9


def test_gpus_outside_a_domain_meet_in_the_host(fat_tree: Cluster) -> None:
    pairs = ScaleUpDomain(kind="nvlink", gpus=2, gpu_bytes_per_s=300e9, latency_s=1e-6)
    host = Host(gpu_bytes_per_s=31e9, latency_s=1e-6, sockets=2, socket_bytes_per_s=16e9)
    box = msgspec.structs.replace(fat_tree, scale_up=pairs, host=host)
    assert box.tier_between(0, 2) == "host"
    assert box.bandwidth_between(0, 2) == 31e9
    assert box.bandwidth_between(0, 4) == 16e9
    assert box.hops_between(0, 2) == 1
    assert box.hops_between(0, 4) == 2


def test_a_mesh_gives_a_pair_only_its_own_link() -> None:
    mesh = list_clusters()["azure-nd-mi300x-v5"]
    assert mesh.scale_up.gpu_bytes_per_s == 7 * mesh.bandwidth_between(0, 1)


def test_a_domain_may_span_nodes() -> None:
    rack = list_clusters()["gb200-nvl72"]
    assert rack.gpus_per_node == 4
    assert rack.tier_between(0, 71) == "scale-up"
    assert rack.tier_between(0, 72) == "leaf"
    assert (rack.domain_of(71), rack.domain_of(72)) == (0, 1)


def test_with_gpus_takes_just_enough_nodes(fat_tree: Cluster) -> None:
    assert fat_tree.with_gpus(1).nodes == 1
    assert fat_tree.with_gpus(8).nodes == 1
    assert fat_tree.with_gpus(9).nodes == 2
    assert fat_tree.with_gpus(16384).gpus == 16384


def test_with_gpus_keeps_nodes_whole(fat_tree: Cluster) -> None:
    assert fat_tree.with_gpus(2047).gpus == 2048


def test_with_gpus_stops_at_the_largest_size(fat_tree: Cluster) -> None:
    small = msgspec.structs.replace(fat_tree, max_nodes=64)
    with pytest.raises(InputError, match="1 to 512"):
        small.with_gpus(513)
    with pytest.raises(InputError, match="1 or more"):
        fat_tree.with_gpus(0)


def test_a_rank_outside_the_cluster_is_refused(fat_tree: Cluster) -> None:
    for rank in (-1, 512):
        with pytest.raises(InputError, match="0 to 511"):
            fat_tree.node_of(rank)
        with pytest.raises(InputError, match="0 to 511"):
            fat_tree.bandwidth_between(0, rank)


def test_every_fault_of_a_cluster_is_listed(fat_tree: Cluster) -> None:
    with pytest.raises(InputError) as caught:
        msgspec.structs.replace(
            fat_tree,
            nodes=65,
            max_nodes=64,
            gpus_per_node=6,
            nics=None,
            sources=(SpecSource(fields=("nicks",), text="x"),),
        )
    places = [problem.where for problem in caught.value.problems]
    assert places == ["nics", "nics", "scale_up.gpus", "nodes", "sources"]


def test_nodes_without_cards_must_share_a_domain(fat_tree: Cluster) -> None:
    none = Fabric(kind="none")
    rack = msgspec.structs.replace(fat_tree.scale_up, gpus=64)
    joined = msgspec.structs.replace(fat_tree, nodes=8, scale_up=rack, nics=None, fabric=none)
    assert joined.tier_between(0, 63) == "scale-up"
    with pytest.raises(InputError, match="no NIC"):
        msgspec.structs.replace(joined, nodes=9)


def test_the_top_layer_must_reach_all_nodes(fat_tree: Cluster) -> None:
    small = Fabric(kind="roce", tiers=(SwitchTier(name="leaf", nodes=32),))
    with pytest.raises(InputError, match="the top layer joins 32 nodes"):
        msgspec.structs.replace(fat_tree, fabric=small)


@given(data=st.data(), name=st.sampled_from(NAMES))
def test_bandwidth_and_latency_are_the_same_both_ways(data: st.DataObject, name: str) -> None:
    cluster = list_clusters()[name]
    ranks = st.integers(0, cluster.gpus - 1)
    a, b = data.draw(ranks), data.draw(ranks)
    assert cluster.bandwidth_between(a, b) == cluster.bandwidth_between(b, a)
    assert cluster.latency_between(a, b) == cluster.latency_between(b, a)
    assert cluster.tier_between(a, b) == cluster.tier_between(b, a)


@given(data=st.data(), name=st.sampled_from(NAMES))
def test_no_pair_gets_more_than_the_links_of_one_gpu(data: st.DataObject, name: str) -> None:
    cluster = list_clusters()[name]
    ranks = st.integers(0, cluster.gpus - 1)
    a, b = data.draw(ranks), data.draw(ranks)
    tier, rate = cluster.tier_between(a, b), cluster.bandwidth_between(a, b)
    assert 0 < rate <= cluster.gpu.memory_bytes_per_s
    if tier == "scale-up":
        assert rate <= cluster.scale_up.gpu_bytes_per_s
    elif tier == "host":
        assert rate <= cluster.host.gpu_bytes_per_s
    elif tier != "same":
        assert rate <= cluster.nic_bytes_per_s_per_gpu


@given(data=st.data(), name=st.sampled_from(NAMES))
def test_a_third_rank_is_never_farther_than_both_legs(data: st.DataObject, name: str) -> None:
    cluster = list_clusters()[name]
    ranks = st.integers(0, cluster.gpus - 1)
    a, b, c = data.draw(ranks), data.draw(ranks), data.draw(ranks)
    legs = cluster.latency_between(a, b) + cluster.latency_between(b, c)
    assert cluster.latency_between(a, c) <= legs + 1e-12
