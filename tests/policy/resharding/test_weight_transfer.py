"""Every element that is wanted comes once, from somebody who has it, in as few bytes as may be."""

from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.policy.resharding.tensor_box import TensorBox
from meshwright.policy.resharding.weight_transfer import (
    RankShards,
    TensorSlice,
    WeightTransferPlan,
    plan_weight_transfer,
)

WHOLE = (8, 6)


def rows(first: int, last: int, *formats: str) -> dict[str, RankShards]:
    """Hold some rows of the one tensor."""
    return {
        "w": RankShards(formats or ("bf16",), WHOLE, (TensorBox((first, 0), (last - first, 6)),))
    }


def columns(first: int, last: int, *formats: str) -> dict[str, RankShards]:
    return {
        "w": RankShards(formats or ("bf16",), WHOLE, (TensorBox((0, first), (8, last - first)),))
    }


def places(box: TensorBox) -> set[tuple[int, ...]]:
    axes = (range(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
    return set(product(*axes))


def cut(total: int, points: list[int]) -> list[tuple[int, int]]:
    ends = [0, *sorted({point for point in points if 0 < point < total}), total]
    return list(pairwise(ends))


POINTS = st.lists(st.integers(1, 7), max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    POINTS, POINTS, st.integers(1, 3), st.integers(1, 3), st.sampled_from(["direct", "broadcast"])
)
def test_every_wanted_element_comes_exactly_once_from_a_holder(
    held: list[int], wanted: list[int], replicas: int, engines: int, fan: str
) -> None:
    sources = [rows(*pair) for _ in range(replicas) for pair in cut(8, held)]
    targets = [columns(*pair) for _ in range(engines) for pair in cut(6, wanted)]
    plan = plan_weight_transfer(sources, targets, fan=fan)  # type: ignore[arg-type]
    for rank, target in enumerate(targets):
        got = [place for each in plan.slices if rank in each.targets for place in places(each.box)]
        assert len(got) == len(set(got))
        assert set(got) == places(target["w"].boxes[0])
    for each in plan.slices:
        assert places(each.box) <= places(sources[each.source]["w"].boxes[0])
    together = sorted(
        (each.tensor_name, each.box, each.source, to) for each in plan.slices for to in each.targets
    )
    parcels = plan.make_buckets(most_bytes=20)
    assert together == sorted(
        (each.tensor_name, each.box, parcel.source, to)
        for parcel in parcels
        for each in parcel.slices
        for to in parcel.targets
    )
    assert sum(each.size_bytes for each in parcels) >= sum(each.size_bytes for each in plan.slices)


def test_replicas_share_the_sending() -> None:
    plan = plan_weight_transfer([rows(0, 8)] * 4, [rows(0, 8)] * 4)
    assert plan.sent_bytes() == [96] * 4
    assert plan.received_bytes() == [96] * 4


def test_a_broadcast_leaves_its_source_once() -> None:
    plan = plan_weight_transfer([rows(0, 4), rows(4, 8)], [rows(0, 8)] * 3, fan="broadcast")
    assert plan.sent_bytes() == [48, 48]
    assert [each.targets for each in plan.slices] == [(0, 1, 2)] * 2
    assert plan.moved_bytes == 3 * 96


def test_what_is_on_the_seat_already_does_not_travel() -> None:
    plan = plan_weight_transfer([rows(0, 8)] * 2, [rows(0, 4), rows(4, 8)], target_seats=(0, 1))
    assert plan.moved_bytes == 0
    assert all(plan.is_local(each) for each in plan.slices)
    plan = plan_weight_transfer(
        [rows(0, 4), rows(4, 8)], [rows(4, 8), rows(0, 4)], target_seats=(0, 1)
    )
    assert plan.received_bytes() == [48, 48]


def test_a_holder_in_the_same_node_sends() -> None:
    nodes = (0, 1, 0, 1)
    plan = plan_weight_transfer([rows(0, 8)] * 2, [rows(0, 8)] * 2, nodes=nodes)
    assert [(each.source, each.targets) for each in plan.slices] == [(0, (0,)), (1, (1,))]


def wires(plan: WeightTransferPlan) -> set[tuple[tuple[str, ...], tuple[str, ...]]]:
    return {(each.source_casts, each.target_casts) for each in plan.slices}


def test_numbers_are_rounded_where_that_saves_bytes() -> None:
    narrowing = plan_weight_transfer([rows(0, 8, "fp32")], [rows(0, 8, "bf16")])
    assert wires(narrowing) == {(("fp32", "bf16"), ("bf16",))}
    widening = plan_weight_transfer([rows(0, 8, "bf16")], [rows(0, 8, "fp32")])
    assert wires(widening) == {(("bf16",), ("bf16", "fp32"))}
    assert narrowing.moved_bytes == widening.moved_bytes == 96


def test_fp8_travels_where_a_sender_has_whole_rows_of_the_target() -> None:
    want = ("bf16", "fp8-rows")
    whole = plan_weight_transfer([rows(0, 4, "fp32"), rows(4, 8, "fp32")], [rows(0, 8, *want)])
    assert wires(whole) == {(("fp32", "bf16", "fp8-rows"), ("fp8-rows",))}
    assert whole.moved_bytes == 48 + 8 * 4, "a byte for each element, a scale for each row"
    parts = plan_weight_transfer(
        [columns(0, 3, "fp32"), columns(3, 6, "fp32")], [rows(0, 8, *want)]
    )
    assert wires(parts) == {(("fp32", "bf16"), ("bf16", "fp8-rows"))}
    own = plan_weight_transfer(
        [columns(0, 3), columns(3, 6)], [columns(0, 3, *want), columns(3, 6, *want)]
    )
    assert wires(own) == {(("bf16", "fp8-rows"), ("fp8-rows",))}


def test_turns_have_one_parcel_of_each_source() -> None:
    plan = plan_weight_transfer([rows(0, 4), rows(4, 8)], [columns(0, 3), columns(3, 6)])
    turns = plan.schedule_buckets(most_bytes=1)
    assert [[each.source for each in turn] for turn in turns] == [[0, 1], [0, 1]]


def test_plans_of_the_same_values_are_the_same() -> None:
    one, other = (plan_weight_transfer([rows(0, 8)] * 2, [rows(0, 8)] * n) for n in (1, 2))
    assert one.digest == plan_weight_transfer([rows(0, 8)] * 2, [rows(0, 8)]).digest != other.digest


@pytest.mark.parametrize(
    ("sources", "targets", "said"),
    [
        ([rows(0, 4)], [rows(0, 8)], "24 of 48 elements are held by no source"),
        ([{}], [rows(0, 8)], "no source has such a tensor"),
        ([rows(0, 8)], [{"w": RankShards(("bf16",), (8, 7), ())}], r"\[8, 7\], not \[8, 6\]"),
        ([rows(0, 8), rows(0, 8, "fp32")], [rows(0, 8)], "another format"),
        ([rows(0, 8, "fp8-rows")], [rows(0, 8)], "sources keep it as fp8"),
        ([rows(0, 8, "bf15")], [rows(0, 8)], "bf16"),
    ],
)
def test_what_cannot_be_sent_is_refused(
    sources: list[dict[str, RankShards]], targets: list[dict[str, RankShards]], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        plan_weight_transfer(sources, targets)


def test_seats_are_checked() -> None:
    with pytest.raises(InputError, match="source_seats"):
        plan_weight_transfer([rows(0, 8)] * 2, [rows(0, 8)], source_seats=(0, 0))
    with pytest.raises(InputError, match="seat 1 has none"):
        plan_weight_transfer([rows(0, 8)], [rows(0, 8)], nodes=(0,))
    with pytest.raises(InputError, match="broadcast"):
        plan_weight_transfer([rows(0, 8)], [rows(0, 8)], fan="brodcast")  # type: ignore[arg-type]


def test_a_slice_says_what_either_side_does() -> None:
    box = TensorBox((0, 0), (2, 6))
    one = TensorSlice("w", box, 0, (0,), ("fp32", "bf16", "fp8-rows"), "bf16")
    assert (one.source_casts, one.target_casts) == (("fp32", "bf16"), ("bf16", "fp8-rows"))
    assert one.size_bytes == 24
