"""The time of collectives: laws that hold everywhere, and a few numbers that were measured."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.predict.network import (
    NcclOp,
    Placement,
    build_strided_placement,
    bus_factor,
    collective_s,
    compute_share,
    predict_collective,
    share_nics,
)
from meshwright.predict.network.collective_cost import OPS
from meshwright.predict.network.wire_bound import bound_s_per_byte
from meshwright.spec.catalog import get_cluster, list_clusters
from tests.counted import instructions

H100 = get_cluster("h100-superpod")
SEVERAL = sorted(name for name, value in list_clusters().items() if value.nics is not None)


@st.composite
def groups(draw: st.DrawFn) -> Placement:
    system = get_cluster(draw(st.sampled_from(SEVERAL)))
    node = system.gpus_per_node
    stride = draw(st.sampled_from([1, 2, 4, node, 2 * node]))
    size = draw(st.integers(1, 64))
    most = system.max_nodes or 10**6
    nodes = min(most, -(-((size - 1) * stride + 1) // node))
    size = min(size, (nodes * node - 1) // stride + 1)
    return build_strided_placement(system.with_gpus(nodes * node), 0, size, stride)


operations = st.sampled_from(OPS)
sizes = st.floats(0, 2e11)
versions = st.sampled_from(["2.18", "2.21", "2.27", "2.28", "2.30"])


@given(place=groups(), op=operations, nbytes=sizes, nccl=versions)
def test_no_collective_beats_its_wires(
    place: Placement, op: NcclOp, nbytes: float, nccl: str
) -> None:
    cost = predict_collective(place, op, nbytes, nccl=nccl)
    assert cost.seconds >= cost.bound_s
    assert cost.bound_s == nbytes * bound_s_per_byte(op, place)


@given(place=groups(), op=operations, few=sizes, more=sizes, nccl=versions)
def test_time_never_falls_with_size(
    place: Placement, op: NcclOp, few: float, more: float, nccl: str
) -> None:
    few, more = sorted((few, more))
    assert collective_s(place, op, few, nccl) <= collective_s(place, op, more, nccl)


@given(op=operations, nbytes=sizes)
def test_a_group_of_one_costs_nothing(op: NcclOp, nbytes: float) -> None:
    alone = build_strided_placement(H100, 5, 1)
    assert collective_s(alone, op, nbytes) == 0
    assert predict_collective(alone, op, nbytes).seconds == 0


@given(place=groups(), op=operations, nbytes=sizes)
def test_both_ways_to_ask_agree(place: Placement, op: NcclOp, nbytes: float) -> None:
    assert predict_collective(place, op, nbytes).seconds == collective_s(place, op, nbytes)


@given(place=groups(), op=operations, nbytes=sizes, times=st.floats(1, 16))
def test_sharing_cards_never_helps(
    place: Placement, op: NcclOp, nbytes: float, times: float
) -> None:
    shared = share_nics(place, times)
    assert collective_s(shared, op, nbytes) >= collective_s(place, op, nbytes) * (1 - 1e-12)


@given(place=groups(), nbytes=st.floats(1, 1e10))
@settings(max_examples=50)
def test_every_answer_is_finite_and_positive(place: Placement, nbytes: float) -> None:
    for op in OPS:
        cost = predict_collective(place, op, nbytes)  # type: ignore[arg-type]
        assert math.isfinite(cost.seconds)
        assert place.ranks == 1 or (cost.seconds > 0 and cost.channels >= 1)


@pytest.mark.parametrize(
    ("name", "gpus", "op", "nbytes", "measured_gbps"),
    [
        # nccl-tests bus bandwidths: NVIDIA DGXC and stas00/ml-engineering (1 node), dstack
        # examples (Nebius, Lambda), xxrjun (H100), CoreWeave nccl-tests (96 GPUs).
        ("h100-superpod", 8, "all_reduce", 8 << 30, 480),
        ("h100-superpod", 8, "all_gather", 8 << 30, 359),
        ("h100-superpod", 8, "all_to_all", 16 << 30, 348),
        ("h100-superpod", 16, "all_reduce", 8 << 30, 468),
        ("h100-superpod", 96, "all_reduce", 8 << 30, 387),
        ("b200-superpod", 8, "all_reduce", 8 << 30, 838),
        ("b200-superpod", 16, "all_reduce", 2 << 30, 696),
        ("gb200-nvl72", 64, "all_reduce", 8 << 30, 892),
        ("dgx-a100-80g", 8, "all_reduce", 2 << 30, 232),
    ],
)
def test_bus_bandwidth_is_near_the_measured_one(
    name: str, gpus: int, op: NcclOp, nbytes: int, measured_gbps: float
) -> None:
    cost = predict_collective(build_strided_placement(get_cluster(name), 0, gpus), op, nbytes)
    assert cost.busbw_bytes_per_s / 1e9 == pytest.approx(measured_gbps, rel=0.12)


def test_all_to_all_falls_off_a_cliff_between_racks() -> None:
    rack = get_cluster("gb200-nvl72")
    one = predict_collective(
        build_strided_placement(rack, 0, 72), "all_to_all", 8 << 30
    ).busbw_bytes_per_s
    two = predict_collective(
        build_strided_placement(rack, 0, 144), "all_to_all", 8 << 30
    ).busbw_bytes_per_s
    # Published: 623 to 667 GB/s in a rack, 90 across two.
    assert one / two > 5


def test_switch_reductions_speed_up_many_nodes() -> None:
    place = build_strided_placement(H100, 0, 64)
    plain = predict_collective(place, "all_reduce", 4 << 30)
    sharp = predict_collective(place, "all_reduce", 4 << 30, collnet=True)
    assert sharp.seconds < plain.seconds
    assert sharp.algorithm in ("nvls", "collnet_direct", "collnet_chain")


def test_restricting_algorithms_restricts_the_answer() -> None:
    place = build_strided_placement(H100, 0, 8)
    free = predict_collective(place, "all_reduce", 1 << 30)
    ring = predict_collective(place, "all_reduce", 1 << 30, only=("ring",))
    assert (free.algorithm, ring.algorithm) == ("nvls", "ring")
    assert ring.seconds > free.seconds


def test_small_messages_take_few_multiprocessors() -> None:
    place = build_strided_placement(H100, 0, 8)
    assert predict_collective(place, "all_gather", 1024).channels == 1
    assert predict_collective(place, "all_gather", 1 << 30).channels == 24
    assert compute_share(24, 132) == pytest.approx(1 - 24 / 132)


@pytest.mark.parametrize(
    ("op", "factor"), [("all_reduce", 1.75), ("all_gather", 0.875), ("broadcast", 1.0)]
)
def test_bus_factor_is_that_of_nccl_tests(op: NcclOp, factor: float) -> None:
    assert bus_factor(op, 8) == factor


def test_every_mistake_of_a_call_is_listed() -> None:
    with pytest.raises(InputError) as caught:
        predict_collective(
            build_strided_placement(H100, 0, 8),
            "allreduce",  # type: ignore[arg-type]
            float("nan"),
            only=("rings",),
        )
    assert len(caught.value.problems) == 3
    assert "all_reduce" in str(caught.value)


def test_unreadable_nccl_version_is_refused() -> None:
    with pytest.raises(InputError, match="NCCL version"):
        predict_collective(build_strided_placement(H100, 0, 8), "all_reduce", 1e6, nccl="newest")


def test_sizes_are_priced_by_few_instructions() -> None:
    """A planner asks 30,000 times a second: what is the same for all sizes is not done again."""
    place = build_strided_placement(H100, 0, 64)
    collective_s(place, "all_reduce", 1.0)
    asked = [1000.0 * index for index in range(1000)]
    assert instructions(lambda: [collective_s(place, "all_reduce", each) for each in asked]) < 2e5


def test_groups_of_a_hundred_thousand_ranks_are_priced() -> None:
    place = build_strided_placement(H100.with_gpus(131072), 0, 131072)
    small, large = (predict_collective(place, "all_reduce", size) for size in (1 << 10, 1 << 34))
    assert small.algorithm in ("tree", "nvls_tree")
    assert small.seconds < 1e-3
    assert large.seconds > large.bound_s
