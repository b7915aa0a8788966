"""Flags become streams of requests: lengths, paces, traces and workloads."""

import argparse
from itertools import islice
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.cli.flags.requests import (
    RequestStream,
    add_request_flags,
    parse_lengths,
    read_streams,
)
from meshwright.errors import InputError
from meshwright.spec.workload import FixedLength, LogNormalLength, UniformLength, WorkloadRequest

SERVEGEN = Path(__file__).parents[4] / "shared/request_traces/servegen"


def _streams(*words: str) -> list[RequestStream]:
    parser = argparse.ArgumentParser()
    add_request_flags(parser)
    return read_streams(parser.parse_args(words))


def _requests(*words: str) -> list[WorkloadRequest]:
    (stream,) = _streams(*words)
    return list(stream.generate())


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    rows = "\n".join(f"{number * 2},{100 + number},{10 + number}" for number in range(11))
    path.write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}\n")
    return str(path)


def test_lengths_are_read_from_words() -> None:
    assert parse_lengths("1k", "x") == FixedLength(tokens=1000)
    assert parse_lengths("100-1024", "x") == UniformLength(low=100, high=1024)
    assert parse_lengths("lognormal:400:0.8", "x") == LogNormalLength(median=400, sigma=0.8)
    for text in ("normal:1:2", "lognormal:1", "many", "5-1"):
        with pytest.raises(InputError):
            parse_lengths(text, "--prompt")


def test_without_flags_one_is_asked_after_another() -> None:
    (stream,) = _streams()
    assert (stream.concurrency, stream.name) == (1, "1 at a time")
    assert len(list(stream.generate())) == 200


def test_rates_and_concurrencies_make_several_streams() -> None:
    assert [one.rate_per_s for one in _streams("--rate", "1,2.5,inf")] == [1.0, 2.5, 1e9]
    assert [one.concurrency for one in _streams("--concurrency", "1,64")] == [1, 64]


def test_a_rate_is_that_of_the_arrivals() -> None:
    found = _requests("--rate", "4", "--arrivals", "constant", "--duration", "10s")
    assert len(found) == 40
    assert found[1].arrival_s == 0.25
    poisson, bursts = (
        _requests("--rate", "4", "--arrivals", kind, "--requests", "2000")
        for kind in ("poisson", "gamma:3")
    )
    for requests in (poisson, bursts):
        assert requests[-1].arrival_s == pytest.approx(500, rel=0.2)


def test_all_at_once_is_all_at_once() -> None:
    assert _requests("--rate", "inf", "--requests", "50")[-1].arrival_s < 1e-6


def test_a_stream_draws_the_same_every_time_and_by_seed() -> None:
    (one,), (other,) = _streams("--prompt", "1-999"), _streams("--prompt", "1-999", "--seed", "1")
    assert list(one.generate()) == list(one.generate())
    assert list(one.generate()) != list(other.generate())


def test_a_closed_loop_with_a_duration_has_requests_without_end() -> None:
    (stream,) = _streams("--concurrency", "4", "--duration", "10s")
    assert len(list(islice(stream.generate(), 5000))) == 5000


def test_prefixes_are_shared() -> None:
    found = _requests("--prefix", "3:256", "--prompt", "300")
    assert len({one.prefix_blocks for one in found}) == 3
    assert {len(one.prefix_blocks) * one.block_tokens for one in found} == {256}


def test_a_trace_is_replayed_as_recorded_faster_or_at_a_rate(trace: str) -> None:
    assert [one.arrival_s for one in _requests("--trace", trace)][-1] == 20.0
    assert _requests("--trace", trace, "--arrival-scale", "4")[-1].arrival_s == 5.0
    assert _requests("--trace", trace, "--rate", "5")[-1].arrival_s == pytest.approx(2.0)
    found = _requests("--trace", trace, "--rate", "5", "--arrivals", "constant")
    assert found[-1].arrival_s == pytest.approx(2.0)
    assert [one.prompt_tokens for one in found] == list(range(100, 111))


def test_a_trace_is_cut_by_count_and_duration(trace: str) -> None:
    assert len(_requests("--trace", trace, "--requests", "4")) == 4
    assert len(_requests("--trace", trace, "--duration", "5s")) == 3
    (stream,) = _streams("--trace", trace, "--concurrency", "2", "--requests", "4")
    assert (stream.concurrency, len(list(stream.generate()))) == (2, 4)


def test_a_trace_without_times_needs_a_pace(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("prompt_tokens,output_tokens\n5,6\n7,8\n")
    for words in ([], ["--arrival-scale", "2"]):
        with pytest.raises(InputError, match="--concurrency"):
            _requests("--trace", str(path), *words)
    assert len(_requests("--trace", str(path), "--rate", "2")) == 2


def test_requests_are_drawn_from_recorded_clients() -> None:
    folder = SERVEGEN / "language"
    if not folder.is_dir():
        pytest.skip("the recorded clients lie beside the repository, in ../shared")
    path = str(next(one.parent for one in sorted(folder.rglob("chunk-*-trace.csv"))))
    assert len(_requests("--trace", path, "--requests", "50")) == 50
    found = _requests("--trace", path, "--duration", "60s", "--arrival-scale", "10")
    assert 0 < found[-1].arrival_s < 60
    for words in ([], ["--duration", "60s", "--concurrency", "4"]):
        with pytest.raises(InputError, match="--requests"):
            _requests("--trace", path, *words)


def test_a_workload_is_read_and_its_pace_may_be_replaced(tmp_path: Path) -> None:
    path = tmp_path / "work.toml"
    path.write_text(
        'kind = "requests"\n[arrival]\nkind = "poisson"\nrate_per_s = 3.0\n'
        '[prompt]\nkind = "fixed"\ntokens = 9\n[output]\nkind = "fixed"\ntokens = 4\n'
    )
    (stream,) = _streams("--workload", str(path))
    assert stream.rate_per_s == 3.0
    (stream,) = _streams("--workload", str(path), "--concurrency", "5")
    assert (stream.concurrency, next(stream.generate()).prompt_tokens) == (5, 9)
    path.write_text('kind = "training"\ntokens = 10\nsequence_length = 5\nglobal_batch = 1\n')
    with pytest.raises(InputError, match="training run"):
        _streams("--workload", str(path))


@pytest.mark.parametrize(
    "words",
    [
        ["--rate", "1", "--concurrency", "2"],
        ["--rate", "inf", "--duration", "5s"],
        ["--rate", "0"],
        ["--rate", ","],
        ["--concurrency", "0"],
        ["--arrival-scale", "2"],
        ["--arrivals", "even", "--rate", "1"],
        ["--prefix", "8"],
        ["--prefix", "8:1024", "--prompt", "512"],
        ["--prefix", "8:600-1024"],
        ["--requests", "0"],
    ],
)
def test_what_makes_no_sense_is_refused_with_a_fix(words: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        _streams(*words)
    assert all(problem.fix for problem in refused.value.problems)


def test_prompts_may_be_as_long_as_what_they_begin_with() -> None:
    assert _requests("--prefix", "8:512", "--prompt", "512")
    assert _requests("--prefix", "8:256-1024", "--prompt", "100-512")
    with pytest.raises(InputError, match="use --prompt 1536"):
        _streams("--prefix", "8:1024", "--prompt", "512")


def test_help_says_what_a_command_takes(capsys: pytest.CaptureFixture[str]) -> None:
    def help_of(*words: str) -> str:
        assert main([*words, "--help"]) == 0
        return " ".join(capsys.readouterr().out.split())

    assert "how many (default: 200," in help_of("bench", "serve")
    simulated, planned = help_of("simulate", "serve"), help_of("plan", "serve")
    assert "how many (default: 2,000," in simulated
    assert "--concurrency" in simulated
    assert "how many (default: 2,000," in planned
    assert "--rate N requests per second" in planned
    assert "--concurrency" not in planned
