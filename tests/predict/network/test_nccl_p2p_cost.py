"""Point-to-point, all-to-all and experts' exchanges."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.predict.network import (
    ExpertTraffic,
    build_placement,
    build_strided_placement,
    collective_s,
    predict_collective,
    predict_expert_dispatch,
)
from meshwright.predict.network.expert_dispatch import expected_distinct
from meshwright.spec.catalog import get_cluster

H100 = get_cluster("h100-superpod")


@pytest.mark.parametrize(
    ("nodes", "per_node", "measured_gbps"),
    # xxrjun, H100 with one 400 Gb/s card per GPU, NCCL 2.29.2, 4 GiB: the larger the group, the
    # fewer channels NCCL gives one peer.
    [(2, 1, 43.8), (2, 8, 45.9), (10, 1, 24.9), (10, 2, 25.2), (10, 8, 15.2)],
)
def test_message_between_nodes_gets_fewer_channels_in_large_groups(
    nodes: int, per_node: int, measured_gbps: float
) -> None:
    ranks = [node * 8 + local for node in range(nodes) for local in range(per_node)]
    cost = predict_collective(
        build_placement(H100, ranks, sharers=1), "send_recv", 4 << 30, nccl="2.29.2"
    )
    assert cost.busbw_bytes_per_s / 1e9 == pytest.approx(measured_gbps, rel=0.15)


@pytest.mark.parametrize(
    ("mebibytes", "measured_us"), [(64, 820), (128, 826), (256, 896), (512, 1509), (4096, 11747)]
)
def test_message_inside_a_node_takes_channels_as_it_grows(
    mebibytes: int, measured_us: float
) -> None:
    # xxrjun, 8 H100, NCCL 2.29.2.
    predicted = collective_s(
        build_strided_placement(H100, 0, 8), "send_recv", mebibytes << 20, "2.29.2"
    )
    assert predicted * 1e6 == pytest.approx(measured_us, rel=0.15)


def test_pipeline_stages_on_other_nodes_pay_the_network() -> None:
    near = collective_s(build_strided_placement(H100, 0, 2), "send_recv", 32 << 20)
    far = collective_s(build_strided_placement(H100, 0, 2, 8), "send_recv", 32 << 20)
    assert far > 2 * near


def test_all_to_all_is_bound_by_each_gpus_card() -> None:
    # 10 nodes of 8: nine tenths of each GPU's bytes leave over its 50 GB/s card.
    cost = predict_collective(build_strided_placement(H100, 0, 80), "all_to_all", 16 << 30)
    assert cost.seconds == pytest.approx(0.9 * (16 << 30) / 48e9, rel=0.05)


def traffic(**changes: float) -> ExpertTraffic:
    settings = {"tokens": 4096, "token_bytes": 7392.0, "top_k": 8, **changes}
    return ExpertTraffic(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("blocks", "measured_us"), [(4, 2068), (20, 492), (24, 498)])
def test_hierarchical_exchange_in_a_node_is_near_deepep(blocks: int, measured_us: float) -> None:
    # Its own two constants come from these runs, so this guards the arithmetic, no more.
    cost = predict_expert_dispatch(
        build_strided_placement(H100, 0, 8), traffic(), style="deepep", multiprocessors=blocks
    )
    assert cost.seconds * 1e6 == pytest.approx(measured_us, rel=0.15)
    assert cost.channels == blocks


def test_hierarchy_spares_the_network() -> None:
    place = build_strided_placement(H100, 0, 64)
    flat = predict_expert_dispatch(place, traffic())
    layered = predict_expert_dispatch(place, traffic(max_domains=4), style="deepep")
    # Eight copies against at most four crossings per token.
    assert layered.seconds < 0.6 * flat.seconds


def test_imbalance_stretches_an_exchange() -> None:
    place = build_strided_placement(H100, 0, 64)
    even = predict_expert_dispatch(place, traffic(), style="deepep").seconds
    skewed = predict_expert_dispatch(place, traffic(load_imbalance=1.5), style="deepep").seconds
    assert 1.4 * even < skewed < 1.5 * even


@given(ranks=st.sampled_from([1, 2, 8, 16, 64, 256]), top_k=st.integers(1, 16))
def test_no_exchange_beats_its_wires(ranks: int, top_k: int) -> None:
    place = build_strided_placement(H100, 0, ranks)
    for style in ("alltoall", "deepep"):
        cost = predict_expert_dispatch(place, traffic(top_k=top_k), style=style)
        assert cost.seconds >= cost.bound_s


def test_distinct_places_of_a_draw() -> None:
    assert expected_distinct(1, 8) == 1
    assert expected_distinct(8, 1) == pytest.approx(1)
    assert expected_distinct(10**6, 8) == pytest.approx(8, rel=1e-4)


def test_every_mistake_of_traffic_is_listed() -> None:
    with pytest.raises(InputError) as caught:
        ExpertTraffic(tokens=0, token_bytes=-1.0, top_k=0)
    assert len(caught.value.problems) == 3
