"""Where groups lie: counts, cards, sharing, and the fast path for strided groups."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.predict.network import crowded, placement, strided
from meshwright.spec.catalog import cluster
from meshwright.spec.cluster import Cluster, Fabric, Tier

H100 = cluster("h100-superpod")
CLUSTERS = ["h100-superpod", "dgx-a100-80g", "aws-p4d", "aws-p5", "gb200-nvl72"]


def test_ranks_of_one_node_need_no_card() -> None:
    place = strided(H100, 0, 8)
    assert (place.units, place.per_unit, place.inside, place.cards) == (1, 8, "scale-up", 0)


def test_data_parallel_ranks_of_one_rail_have_a_card_each() -> None:
    place = strided(H100, 3, 16, 8)
    assert (place.units, place.per_unit, place.cards) == (16, 1, 1)
    assert place.inside == "none"
    assert place.sharers == 1


def test_groups_that_share_a_card_get_a_part_of_it() -> None:
    # p4d has four cards for eight GPUs: each serves two data-parallel groups at once.
    p4d = cluster("aws-p4d")
    assert strided(p4d, 0, 8, 8).sharers == 2
    assert strided(p4d, 0, 8, 8, sharers=1).sharers == 1
    assert strided(p4d, 0, 16).sharers == 1


def test_crowding_multiplies_who_uses_the_cards() -> None:
    place = strided(H100, 0, 16)
    assert crowded(place, 2).sharers == 2 * place.sharers


def test_domain_larger_than_a_node_is_one_unit() -> None:
    rack = cluster("gb200-nvl72")
    assert strided(rack, 0, 72).units == 1
    assert strided(rack, 0, 144).units == 2
    assert strided(rack, 0, 2, 72).per_unit == 1


def oversubscribed(leaf: int, times: float) -> Cluster:
    tiers = (Tier(name="leaf", nodes=leaf), Tier(name="spine", oversubscription=times))
    return msgspec.structs.replace(H100, fabric=Fabric(kind="infiniband", tiers=tiers))


def test_oversubscription_spares_neighbours_in_one_leaf() -> None:
    place = strided(oversubscribed(16, 4), 0, 128)
    assert place.ring_thinning == place.spread_thinning == 1


def test_oversubscription_thins_what_crosses_it() -> None:
    # 64 nodes in leaves of 16: one ring edge in sixteen crosses, most of an all-to-all does.
    place = strided(oversubscribed(16, 4), 0, 512)
    assert place.ring_thinning == 1
    assert place.spread_thinning == pytest.approx(4 * 48 / 63)


def test_groups_that_jump_leaves_cross_on_every_edge() -> None:
    assert strided(oversubscribed(4, 4), 0, 4, 32).ring_thinning == 4


@given(
    name=st.sampled_from(CLUSTERS),
    first=st.integers(0, 40),
    size=st.integers(1, 40),
    stride=st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24, 36, 72]),
)
def test_strided_groups_equal_the_ranks_they_name(
    name: str, first: int, size: int, stride: int
) -> None:
    system = cluster(name).with_gpus(3200)
    ranks = range(first, first + size * stride, stride)
    assert strided(system, first, size, stride) == placement(system, ranks)


def test_every_problem_of_a_group_is_listed() -> None:
    with pytest.raises(InputError) as caught:
        placement(H100, [0, 0, 99999], sharers=0.5)
    text = str(caught.value)
    assert "twice" in text
    assert "99999" in text
    assert "sharers" in text


@pytest.mark.parametrize(("first", "size", "stride"), [(0, 0, 1), (-1, 4, 1), (0, 4, 9999)])
def test_impossible_strides_are_refused(first: int, size: int, stride: int) -> None:
    with pytest.raises(InputError):
        strided(H100, first, size, stride)
