"""Rows for a tuner: they take what is fastest, cover every size and name every channel."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.predict.network import NcclOp, Placement, build_strided_placement
from meshwright.predict.network.explain.explanation import explain_size
from meshwright.predict.network.tuner.tuner_csv import (
    MAX_BYTES,
    TUNED_OPS,
    TunerCall,
    check_tuner_rows,
    find_matching_row,
    read_tuner_csv,
    write_tuner_csv,
)
from meshwright.predict.network.tuner.tuner_rows import build_measured_rows, build_predicted_rows
from meshwright.predict.network.tuner.tuning_sweep import CollectiveTiming
from meshwright.spec.catalog import get_cluster, list_clusters

H100 = get_cluster("h100-superpod")
NODE = build_strided_placement(H100, 0, 8, sharers=1)
FOUR_NODES = build_strided_placement(H100, 0, 32, sharers=1)
RAIL = build_strided_placement(H100, 0, 16, 8, sharers=1)


def measured(
    nbytes: int,
    microseconds: float,
    algorithm: str = "ring",
    channels: int = 8,
    op: NcclOp = "all_reduce",
) -> CollectiveTiming:
    return CollectiveTiming(
        op=op,
        nbytes=nbytes,
        algorithm=algorithm,  # type: ignore[arg-type]
        protocol="simple",
        channels=channels,
        seconds=microseconds * 1e-6,
        nodes=2,
        ranks=16,
    )


@pytest.mark.parametrize("nccl", ["2.19", "2.27", "2.30"])
def test_predicted_rows_have_no_trap_and_round_trip(nccl: str) -> None:
    rows = build_predicted_rows([NODE, FOUR_NODES, RAIL], nccl=nccl)
    assert check_tuner_rows(rows, shapes=[(1, 8), (4, 32), (16, 16)]) == ()
    assert all(row.channels for row in rows)
    assert all(row.nodes and row.ranks for row in rows)
    assert read_tuner_csv(write_tuner_csv(rows)) == rows


@given(
    place=st.sampled_from([NODE, FOUR_NODES, RAIL]),
    op=st.sampled_from(TUNED_OPS),
    nbytes=st.integers(0, 1 << 36),
)
@settings(max_examples=60)
def test_no_other_choice_is_predicted_to_gain_five_percent(
    place: Placement, op: NcclOp, nbytes: int
) -> None:
    rows = build_predicted_rows([place], [op])
    row = find_matching_row(rows, op, nbytes, TunerCall(place.domains, place.ranks))
    assert row is not None
    table = explain_size(place, op, nbytes)
    (taken,) = [
        item
        for item in table.candidates
        if (item.algorithm, item.protocol) == (row.algorithm, row.protocol)
    ]
    assert table.fastest.predicted_us >= taken.predicted_us * 0.95 * (1 - 1e-9)


def disagreements() -> list[tuple[Placement, int]]:
    """Groups and sizes at which something else is predicted to gain a tenth on NCCL's choice."""
    groups = [
        build_strided_placement(value, 0, 8, sharers=1)
        for value in list_clusters().values()
        if value.gpus >= 8
    ]
    found = []
    for place in groups:
        for exponent in range(10, 30):
            table = explain_size(place, "all_reduce", 1 << exponent)
            if table.fastest.predicted_us < 0.9 * table.candidates[0].predicted_us:
                found.append((place, 1 << exponent))
    return found


def test_rows_depart_from_nccls_choice_where_much_is_gained_and_only_there() -> None:
    found = disagreements()
    assert found
    for place, size in found[:: max(1, len(found) // 8)]:
        table, call = explain_size(place, "all_reduce", size), TunerCall(place.domains, place.ranks)
        for gain, wanted in ((0.05, table.fastest), (0.99, table.candidates[0])):
            rows = build_predicted_rows([place], ["all_reduce"], least_gain=gain)
            row = find_matching_row(rows, "all_reduce", size, call)
            assert row is not None
            assert (row.algorithm, row.protocol) == (wanted.algorithm, wanted.protocol)


def test_channels_grow_by_doubling_up_to_nccls_number() -> None:
    rows = build_predicted_rows([NODE], ["all_gather"])[:-1]
    counts = [row.channels for row in rows if row.channels is not None]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 24)
    assert set(counts) <= {1, 2, 4, 8, 16, 24}


def test_every_collective_ends_with_a_ring_for_all_sizes() -> None:
    rows = build_predicted_rows([FOUR_NODES])
    for op in TUNED_OPS:
        last = [row for row in rows if row.op == op][-1]
        assert (last.algorithm, last.protocol, last.channels) == ("ring", "simple", 16)
        assert (last.min_bytes, last.max_bytes) == (0, MAX_BYTES)


def test_groups_of_one_shape_get_one_set_of_rows() -> None:
    other = build_strided_placement(H100, 8, 8, sharers=1)
    assert build_predicted_rows([NODE, other]) == build_predicted_rows([NODE])


def test_mistakes_of_a_request_are_all_listed() -> None:
    with pytest.raises(InputError) as caught:
        build_predicted_rows([build_strided_placement(H100, 0, 1)], ["all_to_all"], least_gain=2)
    assert len(caught.value.problems) == 3
    with pytest.raises(InputError, match="there is no group"):
        build_predicted_rows([])


def test_measured_rows_take_the_fastest_of_each_size() -> None:
    sweep = [
        measured(1024, 20, "tree", 2),
        measured(1024, 30, "ring", 8),
        measured(1 << 20, 90, "tree", 8),
        measured(1 << 20, 60, "ring", 16),
    ]
    low, high, last = build_measured_rows(sweep)
    assert (low.algorithm, low.channels, low.min_bytes) == ("tree", 2, 0)
    assert (high.algorithm, high.channels, high.max_bytes) == ("ring", 16, MAX_BYTES)
    # Halfway by ratio between 1 KiB and 1 MiB.
    assert low.max_bytes == 32768
    assert high.min_bytes == 32769
    assert (last.algorithm, last.protocol, last.channels) == ("ring", "simple", 16)
    assert (high.nodes, high.ranks) == (2, 16)


def test_repeated_measurements_count_with_their_median() -> None:
    noisy = [measured(1024, time, "tree") for time in (10, 50, 51)]
    row, _ = build_measured_rows([*noisy, measured(1024, 40, "ring")])
    assert row.algorithm == "ring"


def test_neighbouring_sizes_with_one_choice_become_one_row() -> None:
    sweep = [measured(1 << exponent, exponent) for exponent in range(10, 20)]
    assert len(build_measured_rows(sweep)) == 2


@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 40), st.floats(1, 1e6), st.sampled_from(["ring", "tree"])),
        min_size=1,
    )
)
def test_measured_rows_cover_every_size(points: list[tuple[int, float, str]]) -> None:
    rows = build_measured_rows(measured(size, time, name) for size, time, name in points)
    assert check_tuner_rows(rows, ops=["all_reduce"]) == ()
    for size in {size for size, _, _ in points}:
        times = {name: [t for s, t, n in points if (s, n) == (size, name)] for _, _, name in points}
        row = find_matching_row(rows, "all_reduce", size, TunerCall(2, 16))
        assert row is not None
        assert times[row.algorithm]


def test_no_measurement_is_refused() -> None:
    with pytest.raises(InputError, match="there is no measurement"):
        build_measured_rows([])
