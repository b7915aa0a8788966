from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.spec.workload import RequestTrace, WorkloadRequest, read_requests, write_requests


def lengths(trace: object) -> list[tuple[int, int]]:
    assert isinstance(trace, RequestTrace)
    return [(request.prompt_tokens, request.output_tokens) for request in trace.requests]


def arrivals(trace: RequestTrace) -> list[float]:
    return [request.arrival_s for request in trace.requests]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def test_azure_dates_become_seconds_from_the_first(file: Path) -> None:
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n"
        "2023-11-16 18:17:04.0319600,3180,8"
    )
    trace = read_requests(file)
    assert arrivals(trace) == pytest.approx([0, 0.052])
    assert lengths(trace) == [(4808, 10), (3180, 8)]


def test_dates_may_name_their_zone_and_come_in_any_order(file: Path) -> None:
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:02.5+00:00,2,2\n"
        "2024-05-10 00:00:00+00:00,1,1\n"
    )
    trace = read_requests(file)
    assert arrivals(trace) == [0, 2.5]
    assert lengths(trace) == [(1, 1), (2, 2)]


def test_vidur_columns_may_stand_in_any_order_among_others(file: Path) -> None:
    file.write_text("num_decode_tokens,x,arrived_at,num_prefill_tokens\n7,a,0.5,90\n")
    trace = read_requests(file)
    assert trace.has_times
    assert arrivals(trace) == [0.5]
    assert lengths(trace) == [(90, 7)]


def test_a_trace_of_lengths_only_is_not_timed(file: Path) -> None:
    file.write_text("num_prefill_tokens,num_decode_tokens,pd_ratio\n3772,54,69.85\n")
    trace = read_requests(file)
    assert not trace.has_times
    assert lengths(trace) == [(3772, 54)]


def test_mooncake_times_are_milliseconds_and_hashes_are_prefix_blocks(file: Path) -> None:
    file.write_text(
        '{"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}\n'
    )
    assert read_requests(file).requests == (
        WorkloadRequest(
            arrival_s=27.482, prompt_tokens=600, output_tokens=52, prefix_blocks=(46, 47),
            block_tokens=512,
        ),
    )  # fmt: skip


def test_the_form_is_found_without_the_file_ending_and_past_a_byte_order_mark(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf\n" + b'{"prompt_tokens": 4, "output_tokens": 0}\n\n')
    assert lengths(read_requests(file)) == [(4, 0)]
    file.write_bytes(b"\xef\xbb\xbfprompt_tokens,output_tokens\n4,1\n\n")
    assert lengths(read_requests(file)) == [(4, 1)]


requests = st.lists(
    st.builds(
        WorkloadRequest,
        arrival_s=st.floats(0, 1e6),
        prompt_tokens=st.integers(64, 10**6),
        output_tokens=st.integers(0, 10**6),
        prefix_blocks=st.lists(st.integers(0, 2**63 - 1), max_size=4).map(tuple),
        block_tokens=st.sampled_from([1, 16]),
    ),
    min_size=1,
    max_size=20,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests)
def test_what_is_written_as_json_lines_reads_back_equal(
    tmp_path: Path, rows: list[WorkloadRequest]
) -> None:
    path = tmp_path / "out.jsonl"
    assert write_requests(rows, path) == len(rows)
    ordered = sorted(rows, key=lambda request: request.arrival_s)
    assert read_requests(path).requests == tuple(ordered)


def test_what_is_written_as_csv_reads_back_equal(tmp_path: Path) -> None:
    rows = [
        WorkloadRequest(arrival_s=at / 7, prompt_tokens=at + 1, output_tokens=at)
        for at in range(50)
    ]
    write_requests(rows, tmp_path / "out.csv")
    assert read_requests(tmp_path / "out.csv").requests == tuple(rows)


def test_csv_refuses_prefixes_rather_than_drop_them(tmp_path: Path) -> None:
    row = WorkloadRequest(arrival_s=0, prompt_tokens=512, output_tokens=1, prefix_blocks=(1,))
    with pytest.raises(InputError, match=r"use the ending \.jsonl"):
        write_requests([row], tmp_path / "out.csv")


def test_an_unknown_ending_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.csv or \.jsonl"):
        write_requests([], tmp_path / "out.txt")
    assert not (tmp_path / "out.txt").exists()


def test_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="file, which is a file, not a folder"):
        write_requests([], tmp_path / "file" / "out.csv")


def test_bad_rows_are_named_by_line_and_the_good_ones_kept(file: Path) -> None:
    file.write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n"
        "0.0,10,1\n"
        "soon,10,1\n"
        "1.0,ten,1\n"
        "1.5,0,1\n"
        "nan,10,1\n"
        "2.0,20,2\n"
        "3.0,3"
    )
    with pytest.raises(DamagedFile) as caught:
        read_requests(file)
    where = [problem.where for problem in caught.value.problems]
    assert where == [f"{file}:{line}" for line in (3, 4, 5, 6, 8)]
    assert "'soon' is not a number" in caught.value.problems[0].what
    assert lengths(caught.value.readable) == [(10, 1), (20, 2)]


def test_a_file_cut_off_in_a_row_keeps_what_came_before(file: Path) -> None:
    line = '{"timestamp": 0, "input_length": 6755, "output_length": 500, "hash_ids": [0, 1]}\n'
    file.write_text(line * 3 + line[:40])
    with pytest.raises(DamagedFile, match=rf"{file.name}:4") as caught:
        read_requests(file)
    assert len(lengths(caught.value.readable)) == 3


def test_many_bad_rows_are_counted_after_the_first_ten(file: Path) -> None:
    file.write_text("prompt_tokens,output_tokens\n" + "x,1\n" * 25)
    with pytest.raises(DamagedFile) as caught:
        read_requests(file)
    assert len(caught.value.problems) == 11
    assert "15 more rows" in caught.value.problems[-1].what


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"timestamp": true, "input_length": 5, "output_length": 1}', "not a number"),
        ('{"timestamp": 1, "input_length": 5.5, "output_length": 1}', "number of tokens"),
        ('{"timestamp": 1, "input_length": 5}', "has no 'output_length'"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": 3}', "block ids"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 1, "hash_ids": [1, 2]}', "not fit"),
        ('{"timestamp": 1e300, "input_length": 5, "output_length": 1}', "out of range"),
        ('{"timestamp": 1' + "0" * 400 + ', "input_length": 5, "output_length": 1}', "row:2"),
        ('{"prompt": 1}', "has no 'prompt_tokens'"),
        ("[1]", "is not an object"),
        ("{" * 100_000, "row:2"),
    ],
)
def test_a_bad_json_row_says_what_is_wrong(file: Path, row: str, says: str) -> None:
    file.write_text('{"prompt_tokens": 4, "output_tokens": 0, "arrival_s": 0}\n' + row)
    with pytest.raises(DamagedFile, match=says.replace("row", file.name)) as caught:
        read_requests(file)
    assert len(lengths(caught.value.readable)) == 1


def test_rows_with_and_without_times_do_not_mix(file: Path) -> None:
    row = '{"prompt_tokens": 4, "output_tokens": 0}\n'
    file.write_text('{"prompt_tokens": 4, "output_tokens": 0, "arrival_s": 0}\n' + row)
    with pytest.raises(DamagedFile, match="in some rows only"):
        read_requests(file)


def problems_of(path: Path) -> tuple[Problem, ...]:
    try:
        read_requests(path)
    except InputError as error:
        return error.problems
    return ()


@given(st.binary(max_size=400))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_bytes_make_the_reader_fail_otherwise(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "noise"
    for head in (b"", b"{", b"TIMESTAMP,ContextTokens,GeneratedTokens\n"):
        path.write_bytes(head + data)
        assert all(str(path) in p.where and p.what and p.fix for p in problems_of(path))


def test_unknown_columns_list_the_known_ones(file: Path) -> None:
    file.write_text("time,in,out\n1,2,3\n")
    with pytest.raises(InputError, match=r"known are .*arrived_at"):
        read_requests(file)


def test_an_empty_trace_is_refused(file: Path) -> None:
    file.write_text("prompt_tokens,output_tokens\n")
    with pytest.raises(DamagedFile, match="holds no requests"):
        read_requests(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file"):
        read_requests(tmp_path / "none.csv")


def test_client_models_point_to_their_own_reader(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="read_clients"):
        read_requests(tmp_path)


def test_a_trace_is_replayed_at_another_rate_with_its_bursts() -> None:
    rows = [
        WorkloadRequest(arrival_s=at, prompt_tokens=1, output_tokens=1) for at in (5.0, 6.0, 9.0)
    ]
    faster = RequestTrace(requests=tuple(rows)).scale_to_rate(2.0)
    assert arrivals(faster) == [0, 0.25, 1]


def test_a_trace_without_times_has_no_rate_to_change() -> None:
    row = WorkloadRequest(arrival_s=0, prompt_tokens=1, output_tokens=1)
    with pytest.raises(InputError, match="no arrival times"):
        RequestTrace(requests=(row, row), has_times=False).scale_to_rate(1.0)
