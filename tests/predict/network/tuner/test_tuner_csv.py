"""The tuner's file: it round-trips, its faults are named, and its trap is seen."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.predict.network.nccl_constants import ALGORITHMS, PROTOCOLS
from meshwright.predict.network.nccl_tuning import NcclOp
from meshwright.predict.network.tuner.tuner_csv import (
    MAX_BYTES,
    TUNED_OPS,
    TunerCall,
    TunerRow,
    check_tuner_csv,
    check_tuner_rows,
    find_matching_row,
    read_tuner_csv,
    write_tuner_csv,
)

EXAMPLE = """\
# Ours, in the manner of the file beside NCCL's example plugin.
allreduce,0,65536,tree,simple,2,1,-1,-1,1

allreduce,65537,1048576,ring,simple,4,4,32,1
allreduce,1048577,4294967295,ring,ll128,-1,-1,-1
"""


@st.composite
def tuner_rows(draw: st.DrawFn) -> TunerRow:
    low, high = sorted(draw(st.tuples(*[st.integers(0, MAX_BYTES)] * 2)))
    return TunerRow(
        op=draw(st.sampled_from(TUNED_OPS)),
        min_bytes=low,
        max_bytes=high,
        algorithm=draw(st.sampled_from(ALGORITHMS)),
        protocol=draw(st.sampled_from(PROTOCOLS)),
        channels=draw(st.none() | st.integers(0, 64)),
        nodes=draw(st.none() | st.integers(1, 4)),
        ranks=draw(st.none() | st.integers(1, 4)),
        pipe_ops=draw(st.none() | st.integers(0, 4)),
        registered=draw(st.none() | st.integers(0, 1)),
    )


def covering(op: NcclOp, channels: int | None = 16, max_bytes: int = MAX_BYTES) -> TunerRow:
    return TunerRow(
        op=op,
        min_bytes=0,
        max_bytes=max_bytes,
        algorithm="ring",
        protocol="simple",
        channels=channels,
        nodes=2,
        ranks=16,
    )


WHOLE = tuple(covering(op) for op in TUNED_OPS)


@given(st.lists(tuner_rows(), max_size=8), st.lists(st.text(max_size=400), max_size=3))
def test_rows_round_trip_under_any_remarks(rows: list[TunerRow], remarks: list[str]) -> None:
    text = write_tuner_csv(rows, remarks)
    assert read_tuner_csv(text) == tuple(rows)
    assert all(len(line.encode()) <= 254 or line.startswith("#") for line in text.split("\n"))


def test_long_remarks_are_wrapped_below_the_plugins_line() -> None:
    text = write_tuner_csv((), ["word " * 200, "x" * 1000])
    assert max(len(line) for line in text.split("\n")) < 254
    assert all(line.startswith("#") for line in text.split("\n") if line)


def test_eight_nine_and_ten_columns_are_read() -> None:
    first, second, third = read_tuner_csv(EXAMPLE)
    assert (first.pipe_ops, first.registered, first.ranks) == (None, 1, None)
    assert (second.pipe_ops, second.registered) == (1, None)
    assert (third.channels, third.nodes, third.max_bytes) == (None, None, 4294967295)
    assert read_tuner_csv(write_tuner_csv((first, second, third))) == (first, second, third)


@pytest.mark.parametrize(
    ("line", "fault", "fix"),
    [
        ("allreduce,0,10,ring,simple,4,1", "7 columns", "collective_type,min_bytes"),
        ("allreduce,0,10,ring,simple,4,1,8,-1,-1,9", "11 columns", "collective_type"),
        ("all_reduce,0,10,ring,simple,4,1,8", "takes for allreduce", "allreduce"),
        ("allreduce,0,10,rings,simple,4,1,8", "takes for ring", "ring"),
        ("allreduce,0,10,ring,LL,4,1,8", "takes for simple", "ll"),
        ("allreduce,0,,ring,simple,4,1,8", "max_bytes is empty", "-1"),
        ("allreduce,0,4G,ring,simple,4,1,8", "'4G' is not a whole number", "digits"),
        ("allreduce,9,3,ring,simple,4,1,8", "below min_bytes", "9 or more"),
        ("allreduce,0,9,ring,simple,65,1,8", "65 channels", "1 to 64"),
        ("allreduce,0,9,ring,simple,4,1,8,-1,2", "2 is not 0 or 1", "0, 1"),
        ("collective_type,min_bytes,max_bytes,algorithm", "a heading for a row", "#"),
        ("allreduce,0,9,ring,simple,4,1,8" + " " * 300, "cuts it at 254", "shorten"),
    ],
)
def test_each_fault_names_its_line_and_its_fix(line: str, fault: str, fix: str) -> None:
    with pytest.raises(InputError) as caught:
        read_tuner_csv(f"# head\n{line}\n", "mine.csv")
    (problem,) = caught.value.problems
    assert problem.where == "mine.csv: line 2"
    assert fault in problem.what
    assert fix in problem.fix


def test_all_faults_of_a_file_are_listed() -> None:
    with pytest.raises(InputError) as caught:
        read_tuner_csv("allreduce,0,x,rong,simple,4,1,8\nnothing\n")
    lines = [int(re.findall(r"line (\d+)", problem.where)[0]) for problem in caught.value.problems]
    assert lines == [1, 1, 2]


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_politely(anything: str) -> None:
    try:
        read_tuner_csv(anything)
    except InputError as refusal:
        assert all(p.where and p.what and p.fix for p in refusal.problems)  # noqa: PT017


def test_the_first_row_that_fits_wins() -> None:
    rows = (covering("all_reduce", 4, 1024), covering("all_reduce", 8))
    call = TunerCall(nodes=2, ranks=16)
    assert find_matching_row(rows, "all_reduce", 1024, call) == rows[0]
    assert find_matching_row(rows, "all_reduce", 1025, call) == rows[1]
    assert find_matching_row(rows, "all_reduce", 1, TunerCall(nodes=2, ranks=8)) is None
    assert find_matching_row(rows, "reduce", 1, call) is None


def test_a_file_that_covers_everything_has_no_trap() -> None:
    assert check_tuner_rows(WHOLE) == ()
    assert check_tuner_rows(WHOLE, shapes=[(2, 16)]) == ()


def test_minus_one_channels_are_reported_with_their_line() -> None:
    text = write_tuner_csv((*WHOLE, covering("all_reduce", None)))
    (problem,) = check_tuner_csv(text, "mine.csv")
    assert problem.where == "mine.csv: line 7"
    assert "ONE channel" in problem.what
    assert "such as 16" in problem.fix


def test_zero_channels_leave_the_number_to_nccl_and_are_no_trap() -> None:
    assert check_tuner_rows(tuple(covering(op, 0) for op in TUNED_OPS)) == ()


def test_a_file_that_ends_at_four_gibibytes_is_reported() -> None:
    rows = (*WHOLE[:-1], covering("all_reduce", 16, 4294967295))
    (problem,) = check_tuner_rows(rows)
    assert "no row fits 4294967296 bytes or more" in problem.what


def test_a_hole_between_two_rows_is_reported_with_its_sizes() -> None:
    upper = TunerRow(
        op="all_reduce",
        min_bytes=2048,
        max_bytes=MAX_BYTES,
        algorithm="ring",
        protocol="simple",
        channels=8,
        nodes=2,
        ranks=16,
    )
    rows = (*WHOLE[:-1], covering("all_reduce", 16, 1023), upper)
    (problem,) = check_tuner_rows(rows)
    assert "no row fits 1024 to 2047 bytes" in problem.what


def test_a_collective_without_rows_is_reported() -> None:
    (problem,) = check_tuner_rows(WHOLE[1:])
    assert "no row is for broadcast" in problem.what
    assert check_tuner_rows(WHOLE[1:], ops=TUNED_OPS[1:]) == ()


def test_a_communicator_of_another_shape_is_reported() -> None:
    problems = check_tuner_rows(WHOLE, shapes=[(2, 16), (1, 8)])
    assert len(problems) == len(TUNED_OPS)
    assert all("1 nodes and 8 ranks" in problem.what for problem in problems)


def test_rows_for_registered_buffers_alone_leave_the_others_uncovered() -> None:
    only = TunerRow(
        op="all_reduce",
        min_bytes=0,
        max_bytes=MAX_BYTES,
        algorithm="nvls",
        protocol="simple",
        channels=16,
        nodes=2,
        ranks=16,
        registered=1,
    )
    (problem,) = check_tuner_rows((*WHOLE[:-1], only))
    assert "unregistered buffers" in problem.what


@given(st.lists(tuner_rows(), max_size=8), st.integers(0, MAX_BYTES), st.integers(0, 1))
def test_rows_without_a_trap_give_every_call_its_channels(
    rows: list[TunerRow], nbytes: int, registered: int
) -> None:
    rows = [*rows, *WHOLE]
    assert not [p for p in check_tuner_rows(rows, shapes=[(2, 16)]) if "no row" in p.what]
    for op in TUNED_OPS:
        assert find_matching_row(rows, op, nbytes, TunerCall(2, 16, 1, registered)) is not None
