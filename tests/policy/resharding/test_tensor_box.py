"""Boxes against sets of places."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from meshwright.policy.resharding.tensor_box import (
    TensorBox,
    any_boxes_overlap,
    intersect_boxes,
    split_disjoint,
    subtract_box,
)

AXIS = st.tuples(st.integers(0, 3), st.integers(0, 3))


def boxes(axes: int) -> st.SearchStrategy[TensorBox]:
    drawn = st.lists(AXIS, min_size=axes, max_size=axes)
    return drawn.map(
        lambda pairs: TensorBox(tuple(a for a, _ in pairs), tuple(n for _, n in pairs))
    )


def places(box: TensorBox) -> set[tuple[int, ...]]:
    axes = (range(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
    return set(product(*axes))


SOME = st.integers(0, 3).flatmap(lambda axes: st.lists(boxes(axes), max_size=6))
PAIRS = st.integers(1, 3).flatmap(lambda axes: st.tuples(boxes(axes), boxes(axes)))


@given(PAIRS)
def test_what_two_have_in_common(pair: tuple[TensorBox, TensorBox]) -> None:
    shared = intersect_boxes(*pair)
    assert (set() if shared is None else places(shared)) == places(pair[0]) & places(pair[1])


@given(PAIRS)
def test_what_one_leaves_of_another(pair: tuple[TensorBox, TensorBox]) -> None:
    left = subtract_box(*pair)
    assert sum(each.num_elements for each in left) == len(places(pair[0]) - places(pair[1]))
    assert {place for each in left for place in places(each)} == places(pair[0]) - places(pair[1])


@given(SOME)
def test_whether_any_overlap(some: list[TensorBox]) -> None:
    total = sum(len(places(box)) for box in some)
    assert any_boxes_overlap(some) == (
        total != len({place for box in some for place in places(box)})
    )


@given(SOME)
def test_pieces_hold_every_place_once_each_inside_its_box(some: list[TensorBox]) -> None:
    pieces = split_disjoint(some)
    every = [place for piece, _ in pieces for place in places(piece)]
    assert sorted(every) == sorted({place for box in some for place in places(box)})
    assert all(box in some and box.contains(piece) for piece, box in pieces)


def test_a_cut_is_made_within_a_box_around() -> None:
    assert TensorBox((3, 1), (2, 2)).slice_in(TensorBox((1, 1), (5, 4))) == (
        slice(2, 4),
        slice(0, 2),
    )
