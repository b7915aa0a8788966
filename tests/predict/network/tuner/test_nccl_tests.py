"""Output of nccl-tests, new and old, turned into rows and into a sweep."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.predict.network import bus_factor
from meshwright.predict.network.tuner.nccl_tests import read_nccl_tests, to_tuning_sweep
from meshwright.predict.network.tuner.tuner_rows import build_measured_rows

NEW = """\
# nccl-tests version 2.19.6 nccl-headers=23007 nccl-library=23007
# Collective test starting: all_reduce_perf_mpi
# nThread 1 nGpus 1 minBytes 1024 maxBytes 67108864 step: 256(factor) warmup iters: 1 iters: 20 agg iters: 1 validation: 1 graph: 0 unalign: 0
#
# Using devices
#  Rank  0 Group  0 Pid   1887 on   worker-0 device  0 [0000:8d:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1888 on   worker-0 device  1 [0000:91:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid   1885 on   worker-1 device  0 [0000:8d:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid   1886 on   worker-1 device  1 [0000:91:00] NVIDIA H100 80GB HBM3
worker-0:1887:1887 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1    20.00    0.05    0.08       0    19.00    0.05    0.08       0
      262144         65536     float     sum      -1    65.54    4.00    6.00       0    65.00    4.03    6.05     N/A
    67108864      16777216     float     sum      -1   1.3e+03   51.20   76.80       0   1310.7   51.20   76.80       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 27.6
"""  # noqa: E501

OLD = """\
# nThread 1 nGpus 2 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
#   Rank  0 Pid  93569 on host-a device  0 [0x86] Tesla T4
#   Rank  1 Pid  93569 on host-a device  1 [0xaf] Tesla T4
#
#                                             out-of-place                       in-place
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
       65536          8192   float    16.57    3.96    1.98  0e+00    13.83    4.74    2.37  0e+00
"""  # noqa: E501

PER_ITERATION = """\
#       size         count      type   redop    root     time   algbw   busbw  #wrong    i_min    i_max    i_p99    i_cv%     time   algbw   busbw  #wrong    i_min    i_max    i_p99    i_cv%  timestamp
        1024           256     float    none       2    20.00    0.05    0.08       3    18.00    25.00    24.00     3.10    19.00    0.05    0.08       0    18.00    25.00    24.00     3.10  2026-01-01 00:00:00
"""  # noqa: E501


def test_the_head_says_who_took_part() -> None:
    run = read_nccl_tests(NEW)
    assert (run.op, run.ranks, run.nodes) == ("all_reduce", 4, 2)


def test_rows_have_both_halves() -> None:
    first, second, third = read_nccl_tests(NEW).rows
    assert (first.nbytes, first.count, first.dtype, first.redop) == (1024, 256, "float", "sum")
    assert first.root is None
    assert first.out_of_place is not None
    assert first.in_place is not None
    assert second.in_place is not None
    assert third.out_of_place is not None
    assert first.out_of_place.seconds == pytest.approx(20e-6)
    assert first.in_place.seconds == pytest.approx(19e-6)
    assert (first.out_of_place.wrong, second.in_place.wrong) == (0, None)
    assert third.out_of_place.seconds == pytest.approx(1.3e-3)
    timing = second.out_of_place
    assert timing is not None
    assert timing.algbw_bytes_per_s == pytest.approx(second.nbytes / timing.seconds, rel=0.01)
    factor = bus_factor("all_reduce", 4)
    assert timing.busbw_bytes_per_s == pytest.approx(timing.algbw_bytes_per_s * factor)


def test_a_table_without_redop_and_root_is_read() -> None:
    run = read_nccl_tests(OLD)
    (row,) = run.rows
    assert (run.op, run.ranks, run.nodes) == (None, 2, 1)
    assert (row.dtype, row.redop, row.root) == ("float", "", None)
    assert row.in_place is not None
    assert row.in_place.seconds == pytest.approx(13.83e-6)
    assert row.in_place.wrong is None


def test_per_iteration_columns_and_timestamps_are_passed_over() -> None:
    (row,) = read_nccl_tests(PER_ITERATION).rows
    assert row.root == 2
    assert row.out_of_place is not None
    assert row.in_place is not None
    assert (row.out_of_place.wrong, row.in_place.wrong) == (3, 0)
    assert row.in_place.seconds == pytest.approx(19e-6)


@pytest.mark.parametrize("mark", ["[1,0]<stdout>:", "0: ", " 12: "])
def test_a_launchers_mark_before_each_line_is_passed_over(mark: str) -> None:
    marked = "\n".join(mark + line for line in NEW.splitlines())
    assert read_nccl_tests(marked) == read_nccl_tests(NEW)


def test_two_runs_in_one_text_are_refused_with_the_usual_cause() -> None:
    twice = NEW.replace("Rank  1", "Rank  0")
    with pytest.raises(InputError, match="rank 0 is listed twice") as caught:
        read_nccl_tests(twice, "log.txt")
    assert "MPI=1" in str(caught.value)
    assert "log.txt: line 7" in str(caught.value)


def test_a_table_under_another_programs_name_is_refused() -> None:
    # Seen in a published page: an all-to-all's table below the command of an all-reduce.
    with pytest.raises(InputError, match=r"1.50 of algbw, but all_gather over 4 ranks has 0.75"):
        read_nccl_tests(NEW.replace("all_reduce_perf", "all_gather_perf"))


def test_a_row_that_breaks_off_is_named() -> None:
    cut = NEW[: NEW.index("65.54") + 3]
    with pytest.raises(InputError, match=r"line 16: the row cannot be read: 6 columns"):
        read_nccl_tests(cut)


def test_a_text_without_a_table_is_refused() -> None:
    with pytest.raises(InputError, match="holds no table"):
        read_nccl_tests("hello")


@given(st.text(max_size=200))
def test_any_text_is_refused_politely(anything: str) -> None:
    heading = PER_ITERATION.splitlines()[0]
    try:
        read_nccl_tests(f"{heading}\n{anything}")
    except InputError as refusal:
        assert all(p.where and p.what and p.fix for p in refusal.problems)  # noqa: PT017


def test_a_run_becomes_a_sweep_with_what_it_was_told_to_use() -> None:
    sweep = to_tuning_sweep([read_nccl_tests(NEW)], algorithm="ring", protocol="ll", channels=16)
    assert [item.nbytes for item in sweep] == [1024, 262144, 67108864]
    assert {(item.op, item.nodes, item.ranks, item.channels) for item in sweep} == {
        ("all_reduce", 2, 4, 16)
    }


def test_two_runs_make_a_tuner_file() -> None:
    ring = to_tuning_sweep([read_nccl_tests(NEW)], algorithm="ring", protocol="simple", channels=16)
    slower = NEW.replace("    20.00", "    30.00").replace("    65.54", "    50.00")
    tree = to_tuning_sweep(
        [read_nccl_tests(slower)], algorithm="tree", protocol="simple", channels=8
    )
    rows = build_measured_rows([*ring, *tree])
    assert [row.algorithm for row in rows] == ["ring", "tree", "ring", "ring"]


def test_what_the_text_does_not_say_must_be_given() -> None:
    old = read_nccl_tests(OLD)
    with pytest.raises(InputError, match="does not say op"):
        to_tuning_sweep([old], algorithm="ring", protocol="ll", channels=2)
    (item,) = to_tuning_sweep([old], algorithm="ring", protocol="ll", channels=2, op="all_gather")
    assert item.op == "all_gather"


def test_wrong_results_are_not_tuned_by() -> None:
    run = read_nccl_tests(PER_ITERATION)
    with pytest.raises(InputError, match="3 wrong elements at 1024 bytes"):
        to_tuning_sweep(
            [run], algorithm="ring", protocol="ll", channels=2, op="reduce", nodes=1, ranks=2
        )
