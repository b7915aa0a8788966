"""Counts, sizes, times and rates as people type and read them."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.spec.units import (
    format_bytes,
    format_count,
    format_flops,
    format_quantity,
    format_ranks,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_number,
    parse_rate,
    parse_seconds,
)

PARSERS = (parse_bytes, parse_count, parse_number, parse_rate, parse_seconds)
FORMATTERS = (format_bytes, format_count, format_flops, format_rate, format_seconds)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4096", 4096), ("16k", 16_000), ("16K", 16_000), ("16Ki", 16_384),
        ("1.5e9", 1_500_000_000), ("405B", 405 * 10**9), ("0.1k", 100), ("1,024", 1024),
        ("1_024", 1024),
        (" 2 M ", 2_000_000),
        ("1.25Mi", 1_310_720), ("-3", -3), ("9007199254740993", 2**53 + 1),
    ],
)  # fmt: skip
def test_count_is_read_exactly(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is not a count"), ("many", "is not a count"), ("1,5", "is not a count"),
        ("1.5", "is not a whole number"), ("3 apples", "unknown unit 'apples'"),
        ("1e999", "too large"), ("nan", "is not a count"), ("inf", "is not a count"),
        ("1e5e5", "is not a count"), ("0x10", "is not a count"), ("٣", "is not a count"),
    ],
)  # fmt: skip
def test_what_is_no_count_is_refused_with_the_text_and_a_fix(text: str, what: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_count(text, "batch")
    (problem,) = caught.value.problems
    assert problem.where == "batch"
    assert repr(text) in problem.what
    assert problem.fix
    assert re.search(what, problem.what)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GB", 80 * 10**9), ("2GiB", 2**31), ("512", 512), ("1kB", 1000), ("1.5 MiB", 1_572_864)],
)
def test_size_is_read_in_bytes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_size_in_bits_is_refused() -> None:
    with pytest.raises(InputError, match="is in bits"):
        parse_bytes("80Gb")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0), ("20us", 2e-5), ("20µs", 2e-5), ("20μs", 2e-5), ("1.5h", 5400.0),
        ("30d", 2_592_000.0), ("250ms", 0.25), ("7ns", 7e-9), ("2", 2.0),
    ],
)  # fmt: skip
def test_time_is_read_in_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("text", "rate"), [("450GB/s", 4.5e11), ("400Gb/s", 5e10), ("400Gbps", 5e10), ("8", 8.0)]
)
def test_rate_is_read_in_bytes_per_second(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(("text", "number"), [("0.5", 0.5), ("1e-5", 1e-5), ("2k", 2000.0)])
def test_number_need_not_be_whole(text: str, number: float) -> None:
    assert parse_number(text) == number


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (format_count(8_030_261_248), "8.03B"), (format_count(128_000), "128k"),
        (format_count(0), "0"), (format_count(999_500), "1M"), (format_count(-1500), "-1.5k"),
        (format_bytes(80e9), "74.5 GiB"), (format_bytes(512), "512 B"),
        (format_flops(5.14e10), "51.4 GFLOP"), (format_rate(4.5e11), "450 GB/s"),
        (format_seconds(2e-5), "20 µs"), (format_seconds(4.2), "4.2 s"),
        (format_seconds(0.9996), "1 s"), (format_seconds(0.25), "250 ms"),
        (format_seconds(90), "90 s"), (format_seconds(7200), "2 h"),
        (format_seconds(31 * 86400), "31 d"), (format_seconds(0), "0 µs"),
        (format_seconds(math.inf), "inf"), (format_count(math.nan), "nan"),
    ],
)  # fmt: skip
def test_figures_are_printed_with_three_digits(printed: str, expected: str) -> None:
    assert printed == expected


@given(st.floats() | st.integers(-(10**30), 10**30).map(float))
def test_any_number_can_be_printed(value: float) -> None:
    assert all(formatter(value) for formatter in FORMATTERS)


@given(st.integers(0, 10**15))
def test_printed_count_lies_within_half_a_percent(value: int) -> None:
    assert float(parse_number(format_count(value))) == pytest.approx(value, rel=5e-3)


@given(st.integers(0, 2**60))
def test_printed_size_lies_within_half_a_percent(value: int) -> None:
    assert parse_bytes(format_bytes(value)) == pytest.approx(value, rel=5e-3, abs=0.5)


@given(st.integers(0, 10**17))
def test_printed_digits_read_back_as_the_same_count(value: int) -> None:
    assert (
        parse_count(f"{value:,}") == parse_count(f"{value:_}") == parse_count(str(value)) == value
    )


@given(
    st.text(max_size=12) | st.from_regex(r"[-+0-9._,eE]{1,8}[kKMGTiBbs/pµ ]{0,4}", fullmatch=True)
)
def test_any_text_is_read_or_refused(text: str) -> None:
    for parser in PARSERS:
        try:
            value = parser(text, "field")
        except InputError as refusal:
            incomplete = [p for p in refusal.problems if not (p.where and p.what and p.fix)]
        else:
            incomplete = []
            assert math.isfinite(value)
        assert incomplete == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(1, "1 GPU"), (0, "0 GPUs"), (2, "2 GPUs"), (1200, "1,200 GPUs"), (1.0, "1 GPU"),
     (0.999999, "1 GPU"), (1.5, "1.5 GPUs")],
)  # fmt: skip
def test_what_is_counted_has_the_number_of_its_count(value: float, text: str) -> None:
    assert format_quantity(value, "GPU") == text


def test_a_plural_may_be_any() -> None:
    assert format_quantity(1.0, "request/s", "requests/s") == "1 request/s"
    assert format_quantity(4.0, "request/s", "requests/s") == "4 requests/s"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([3], "3"), ([2, 1], "1, 2"), ([1, 2, 3, 7], "1–3, 7"), ([4, 2, 0], "0, 2, 4")],
)
def test_ranks_are_written_as_runs(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text
