"""Flow ends become arrows whose beginning is read before their end."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.timeline.perfetto.flow_arrows import find_flow_ends, pair_flows

# rank, start, id, whether the flow starts here
halves = st.tuples(st.integers(0, 2), st.integers(0, 20), st.integers(0, 4), st.booleans())


def arrows(ends: list[tuple[int, int, int, bool]]) -> list[tuple[int, int, int, bool, bool]]:
    """Rank, position, id, begins, turned of all arrow ends, in the order they are read."""
    parts, starts = [], {}
    for rank in range(3):
        mine = sorted(end for end in ends if end[0] == rank)
        start = np.array([end[1] for end in mine], dtype=np.int64)
        out = np.array([end[2] if end[3] else -1 for end in mine], dtype=np.int64)
        into = np.array([-1 if end[3] else end[2] for end in mine], dtype=np.int64)
        parts.append(find_flow_ends(rank, np.arange(len(mine)), start, out, into))
        starts[rank] = start
    found = []
    for rank, arrow in pair_flows(parts).items():
        rows = zip(*(column.tolist() for column in arrow), strict=True)
        found += [(int(starts[rank][row[0]]), rank, *row) for row in rows]
    return [(rank, *rest) for _, rank, *rest in sorted(found, key=lambda row: row[:3])]


@given(st.lists(halves, max_size=20))
def test_every_end_has_a_beginning_that_is_read_earlier(
    ends: list[tuple[int, int, int, bool]],
) -> None:
    begun = set()
    for _, _, flow, begins, turned in arrows(ends):
        if begins:
            assert (flow, turned) not in begun
            begun.add((flow, turned))
        else:
            assert (flow, turned) in begun


@given(st.lists(halves, max_size=20))
def test_every_end_with_a_source_is_drawn_once(ends: list[tuple[int, int, int, bool]]) -> None:
    sources = {flow for _, _, flow, begins in ends if begins}
    targets = [flow for _, _, flow, begins in ends if not begins and flow in sources]
    found = arrows(ends)
    straight = sum(1 for _, _, _, begins, turned in found if not begins and not turned)
    turned_round = sum(1 for _, _, _, begins, turned in found if begins and turned)
    assert straight + turned_round == len(targets)


def test_receive_that_is_posted_before_its_send_is_turned_round() -> None:
    found = arrows([(0, 10, 1, True), (1, 5, 1, False)])
    assert [(rank, begins, turned) for rank, _, _, begins, turned in found] == [
        (1, True, True),
        (0, False, True),
    ]


def test_ends_without_partner_are_left_out() -> None:
    assert arrows([(0, 1, 1, True), (1, 2, 2, False)]) == []


def test_one_launch_may_lead_to_many_kernels() -> None:
    found = arrows([(0, 0, 1, True), (0, 1, 1, False), (0, 2, 1, False)])
    assert [begins for _, _, _, begins, _ in found] == [True, False, False]


def test_launches_that_ranks_count_alike_lead_to_kernels_of_their_own_rank() -> None:
    found = arrows([(0, 0, 1, True), (1, 1, 1, True), (1, 2, 1, False), (0, 3, 1, False)])
    begun = {rank: flow for rank, _, flow, begins, _ in found if begins}
    ended = {rank: flow for rank, _, flow, begins, _ in found if not begins}
    assert begun == ended
    assert len(set(begun.values())) == 2


@given(st.lists(halves, max_size=20))
def test_no_two_arrows_share_an_id(ends: list[tuple[int, int, int, bool]]) -> None:
    begun = [flow for _, _, flow, begins, _ in arrows(ends) if begins]
    assert len(begun) == len(set(begun))
