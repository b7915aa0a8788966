"""Where groups lie: counts, cards, sharing, and the fast path for strided groups."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.predict.network import build_placement, build_strided_placement, share_nics
from meshwright.spec.catalog import get_cluster
from meshwright.spec.cluster import Cluster, Fabric, SwitchTier

H100 = get_cluster("h100-superpod")
CLUSTERS = ["h100-superpod", "dgx-a100-80g", "aws-p4d", "aws-p5", "gb200-nvl72"]


def test_ranks_of_one_node_need_no_card() -> None:
    place = build_strided_placement(H100, 0, 8)
    assert (place.domains, place.ranks_per_domain, place.intra_link, place.nics) == (
        1,
        8,
        "scale-up",
        0,
    )


def test_data_parallel_ranks_of_one_rail_have_a_card_each() -> None:
    place = build_strided_placement(H100, 3, 16, 8)
    assert (place.domains, place.ranks_per_domain, place.nics) == (16, 1, 1)
    assert place.intra_link == "none"
    assert place.groups_per_nic == 1


def test_groups_that_share_a_card_get_a_part_of_it() -> None:
    # p4d has four cards for eight GPUs: each serves two data-parallel groups at once.
    p4d = get_cluster("aws-p4d")
    assert build_strided_placement(p4d, 0, 8, 8).groups_per_nic == 2
    assert build_strided_placement(p4d, 0, 8, 8, sharers=1).groups_per_nic == 1
    assert build_strided_placement(p4d, 0, 16).groups_per_nic == 1


def test_crowding_multiplies_who_uses_the_cards() -> None:
    place = build_strided_placement(H100, 0, 16)
    assert share_nics(place, 2).groups_per_nic == 2 * place.groups_per_nic


def test_domain_larger_than_a_node_is_one_unit() -> None:
    rack = get_cluster("gb200-nvl72")
    assert build_strided_placement(rack, 0, 72).domains == 1
    assert build_strided_placement(rack, 0, 144).domains == 2
    assert build_strided_placement(rack, 0, 2, 72).ranks_per_domain == 1


def oversubscribed(leaf: int, times: float) -> Cluster:
    tiers = (SwitchTier(name="leaf", nodes=leaf), SwitchTier(name="spine", oversubscription=times))
    return msgspec.structs.replace(H100, fabric=Fabric(kind="infiniband", tiers=tiers))


def test_oversubscription_spares_neighbours_in_one_leaf() -> None:
    place = build_strided_placement(oversubscribed(16, 4), 0, 128)
    assert place.ring_oversubscription == place.all_to_all_oversubscription == 1


def test_oversubscription_thins_what_crosses_it() -> None:
    # 64 nodes in leaves of 16: one ring edge in sixteen crosses, most of an all-to-all does.
    place = build_strided_placement(oversubscribed(16, 4), 0, 512)
    assert place.ring_oversubscription == 1
    assert place.all_to_all_oversubscription == pytest.approx(4 * 48 / 63)


def test_groups_that_jump_leaves_cross_on_every_edge() -> None:
    assert build_strided_placement(oversubscribed(4, 4), 0, 4, 32).ring_oversubscription == 4


@given(
    name=st.sampled_from(CLUSTERS),
    first=st.integers(0, 40),
    size=st.integers(1, 40),
    stride=st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24, 36, 72]),
)
def test_strided_groups_equal_the_ranks_they_name(
    name: str, first: int, size: int, stride: int
) -> None:
    system = get_cluster(name).with_gpus(3200)
    ranks = range(first, first + size * stride, stride)
    assert build_strided_placement(system, first, size, stride) == build_placement(system, ranks)


def test_every_problem_of_a_group_is_listed() -> None:
    with pytest.raises(InputError) as caught:
        build_placement(H100, [0, 0, 99999], sharers=0.5)
    text = str(caught.value)
    assert "twice" in text
    assert "99999" in text
    assert "sharers" in text


@pytest.mark.parametrize(("first", "size", "stride"), [(0, 0, 1), (-1, 4, 1), (0, 4, 9999)])
def test_impossible_strides_are_refused(first: int, size: int, stride: int) -> None:
    with pytest.raises(InputError):
        build_strided_placement(H100, first, size, stride)
