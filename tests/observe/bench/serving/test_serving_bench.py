"""The load generator against a server in this process: what it saw is what the server did."""

import asyncio
import os
import signal
from collections.abc import Iterator
from itertools import islice

import aiohttp
import pytest

from meshwright.errors import InputError, MissingDependency
from meshwright.observe.bench.serving.http_request import PreparedRequest
from meshwright.observe.bench.serving.load_generator import (
    GeneratorStats,
    LoadPacing,
    prefetch_requests,
)
from meshwright.observe.bench.serving.openai_protocol import Api, RequestOptions
from meshwright.observe.bench.serving.request_result import RequestResult
from meshwright.observe.bench.serving.server_probe import (
    find_single_token_words,
    parse_base_url,
    probe_server,
)
from meshwright.observe.bench.serving.serving_bench import (
    LoadPoint,
    ServingBenchConfig,
    ServingBenchOutcome,
    run_serving_bench,
)
from meshwright.spec.workload import WorkloadRequest
from tests.observe.bench.serving.fake_server import FakeServer, serving


@pytest.fixture(scope="module")
def running() -> Iterator[FakeServer]:
    with serving() as fake:
        yield fake


@pytest.fixture
def fake(running: FakeServer) -> FakeServer:
    url = running.url
    running.__init__()  # type: ignore[misc]
    running.url = url
    return running


def _turn(
    count: int, *, in_flight: int | None = 4, output: int = 6, gap_s: float = 0.0, prompt: int = 20
) -> LoadPoint:
    def draw() -> Iterator[WorkloadRequest]:
        for number in range(count):
            yield WorkloadRequest(
                arrival_s=number * gap_s, prompt_tokens=prompt + number % 3, output_tokens=output
            )

    return LoadPoint("a load", draw, None if in_flight else 10.0, in_flight)


def _measured(
    fake: FakeServer, *turns: LoadPoint, asking: RequestOptions | None = None, **more: object
) -> ServingBenchOutcome:
    given: dict[str, object] = {"num_warmups": 0, "timeout_s": 20.0} | more
    settings = ServingBenchConfig(fake.url, asking or RequestOptions(model=""), **given)  # type: ignore[arg-type]
    return run_serving_bench(settings, turns, "mw bench serve", lambda *_: None)


def test_every_request_is_answered_with_its_own_tokens_in_full(fake: FakeServer) -> None:
    asking = RequestOptions(model="", return_token_ids=True)
    (run,) = _measured(fake, _turn(30), asking=asking, keep_answers=True).result.runs
    assert [one.index for one in run.requests] == list(range(30))
    bodies = [said.body for said in fake.written]
    answers = {tuple(body["prompt"]): fake.answer_to(body["prompt"], 6) for body in bodies}
    assert sorted(tuple(v) for v in answers.values()) == sorted(
        one.output for one in run.requests if isinstance(one.output, tuple)
    )
    for one in run.requests:
        assert (one.error, one.output_tokens, one.finish_reason) == ("", 6, "length")
        assert one.prompt_tokens == one.requested_prompt_tokens
        assert len(one.chunk_gaps_us) == 6
        assert one.cached_tokens == one.requested_prompt_tokens // 4


def test_times_are_the_servers_and_a_little_later(fake: FakeServer) -> None:
    fake.first_s, fake.gap_s = 0.03, 0.01
    (run,) = _measured(fake, _turn(1, in_flight=1)).result.runs
    (one,), (said,) = run.requests, fake.written
    first = said.times_s[0] - said.came_s
    assert one.ttft_s >= first >= 0.03
    assert one.e2e_s >= said.times_s[-1] - said.came_s
    assert one.end_s - one.sent_s >= one.e2e_s


def test_a_closed_loop_keeps_its_number_in_flight(fake: FakeServer) -> None:
    fake.gap_s = 0.002
    (run,) = _measured(fake, _turn(20, in_flight=5)).result.runs
    assert fake.most_open == 5
    assert run.generator.max_concurrency_seen == 5


def test_an_open_loop_sends_whether_or_not_answers_have_come(fake: FakeServer) -> None:
    fake.first_s = 0.2
    (run,) = _measured(fake, _turn(12, in_flight=None, gap_s=0.001)).result.runs
    assert fake.most_open == 12
    assert all(one.sent_s >= one.scheduled_s for one in run.requests)
    assert [one.scheduled_s for one in run.requests] == pytest.approx(
        [0.001 * n for n in range(12)]
    )


def test_nothing_is_sent_after_the_duration(fake: FakeServer) -> None:
    fake.gap_s = 0.002
    for in_flight in (2, None):
        turn = _turn(100_000, in_flight=in_flight, gap_s=0.01)
        (run,) = _measured(fake, turn, duration_s=0.15).result.runs
        assert 0 < len(run.requests) < 1000
        assert all(one.scheduled_s < 0.15 for one in run.requests)


def test_a_ramp_is_not_counted(fake: FakeServer) -> None:
    turn = _turn(40, in_flight=None, gap_s=0.01)
    (run,) = _measured(fake, turn, ramp_up_s=0.2).result.runs
    assert {one.in_metrics for one in run.requests} == {False, True}
    assert all(one.in_metrics == (one.sent_s >= 0.2) for one in run.requests)


def test_a_ramp_grows_evenly_to_the_full_rate() -> None:
    pace = LoadPacing(ramp_up_s=10.0)
    due = [pace.schedule_s(number / 100) for number in range(2000)]
    assert due == sorted(due)
    halves = [sum(a <= at < a + 5 for at in due) for a in (0, 5, 10)]
    assert halves == [pytest.approx(125, abs=1), pytest.approx(375, abs=1), 500]


@pytest.mark.parametrize("in_flight", [2, None])
def test_an_interrupt_keeps_what_was_sent(fake: FakeServer, in_flight: int | None) -> None:
    before = signal.getsignal(signal.SIGINT)

    def answered(_: LoadPoint, served: RequestResult) -> None:
        if served.index == 5:
            os.kill(os.getpid(), signal.SIGINT)

    settings = ServingBenchConfig(fake.url, RequestOptions(model=""), num_warmups=0)
    turns = [_turn(10_000, in_flight=in_flight, gap_s=0.01)] * 2
    result = run_serving_bench(settings, turns, "mw bench serve", answered).result
    (run,) = result.runs
    assert result.interrupted
    assert 5 < len(run.requests) < 1000
    assert {one.error for one in run.requests} == {""}
    assert signal.getsignal(signal.SIGINT) is before


def test_the_warm_up_has_other_prompts_and_is_no_part_of_the_result(fake: FakeServer) -> None:
    (run,) = _measured(fake, _turn(5), num_warmups=3).result.runs
    assert len(run.requests) == 5
    prompts = [tuple(said.body["prompt"]) for said in fake.written]
    assert len(set(prompts)) == 8


def test_the_same_seed_asks_the_same_and_runs_ask_different_things(fake: FakeServer) -> None:
    def asked(seed: int, *turns: LoadPoint) -> list[tuple[int, ...]]:
        fake.written.clear()
        _measured(fake, *turns, seed=seed)
        return sorted(tuple(said.body["prompt"]) for said in fake.written)

    assert asked(1, _turn(4)) == asked(1, _turn(4))
    assert asked(1, _turn(4)) != asked(2, _turn(4))
    assert len(set(asked(1, _turn(4), _turn(4)))) == 8


@pytest.mark.parametrize(
    ("fault", "cause", "detail"),
    [
        ("busy", "HTTP 429", "too many requests"),
        ("cut", "connection broken", ""),
        ("error", "error in the stream", "the engine died"),
        ("whole", "no stream", ""),
        ("hang", "timed out", ""),
    ],
)
def test_failures_are_told_apart(fake: FakeServer, fault: str, cause: str, detail: str) -> None:
    fake.fault, fake.fault_every = fault, 3
    (run,) = _measured(fake, _turn(6), timeout_s=0.6).result.runs
    failed = [one for one in run.requests if one.error]
    assert [one.error for one in failed] == [cause] * 2
    assert all(detail in one.error_detail for one in failed)
    assert len(run.requests) == 6


def test_nothing_more_is_sent_where_nothing_succeeds(fake: FakeServer) -> None:
    fake.fault = "busy"
    (run,) = _measured(fake, _turn(500, in_flight=10)).result.runs
    assert run.aborted
    assert len(run.requests) < 100


def test_a_warm_up_that_fails_ends_the_bench_with_the_reason(fake: FakeServer) -> None:
    fake.fault = "busy"
    with pytest.raises(InputError, match="HTTP 429: too many requests"):
        _measured(fake, _turn(5), num_warmups=2)


def test_pieces_of_several_tokens_are_counted_by_the_server(fake: FakeServer) -> None:
    fake.each = 4
    (run,) = _measured(fake, _turn(1, output=10)).result.runs
    assert run.requests[0].chunk_tokens == (4, 4, 2)
    fake.tells_counts = False
    (run,) = _measured(fake, _turn(1, output=10)).result.runs
    assert run.requests[0].chunk_tokens == ()
    assert run.requests[0].output_tokens == 10


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_texts_have_exact_token_counts_too(fake: FakeServer, api: Api) -> None:
    found = _measured(
        fake, _turn(6, prompt=40), asking=RequestOptions(model="", api=api), text_prompts=True
    )
    (run,) = found.result.runs
    assert [one.prompt_tokens for one in run.requests] == [40, 41, 42] * 2
    assert found.token_words is not None
    assert found.token_words.verified


def test_letters_take_the_place_of_words_where_tokens_are_bytes(fake: FakeServer) -> None:
    fake.bytewise = True
    (run,) = _measured(
        fake, _turn(3, prompt=40), asking=RequestOptions(model="", api="chat")
    ).result.runs
    assert [one.prompt_tokens for one in run.requests] == [40, 41, 42]


def test_without_a_tokenizer_a_word_is_taken_for_a_token(fake: FakeServer) -> None:
    fake.tokenizes = False
    found = _measured(fake, _turn(2), text_prompts=True)
    assert found.token_words is not None
    assert not found.token_words.verified
    assert len(fake.written[0].body["prompt"].split()) in (20, 21)


def test_answers_under_load_are_those_given_alone(fake: FakeServer) -> None:
    asking = RequestOptions(model="", return_token_ids=True)
    echo = _measured(fake, _turn(20, in_flight=20), asking=asking, check_answers=True).answer_check
    assert echo == (20, (), ())


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_streams_at_once_keep_their_tokens_apart(fake: FakeServer, count: int) -> None:
    fake.first_s = count / 1000
    asking = RequestOptions(model="", return_token_ids=True)
    turn = _turn(count, in_flight=count, output=3)
    (run,) = _measured(fake, turn, asking=asking, keep_answers=True).result.runs
    assert fake.most_open == count
    assert {one.error for one in run.requests} == {""}
    wanted = {tuple(fake.answer_to(said.body["prompt"], 3)) for said in fake.written}
    assert {one.output for one in run.requests} == wanted


def test_the_key_is_sent(fake: FakeServer) -> None:
    _measured(fake, _turn(1), api_key="secret")
    assert fake.written[0].headers["Authorization"] == "Bearer secret"


def test_the_server_says_what_it_is(fake: FakeServer) -> None:
    server = _measured(fake, _turn(1)).result.server
    assert (server.model, server.software, server.max_model_len) == ("fake", "tests 1.2", 4096)
    assert (
        _measured(fake, _turn(1), asking=RequestOptions(model="other")).result.server.model
        == "other"
    )
    with pytest.raises(InputError, match="use one of fake, other"):
        _measured(fake, _turn(1), asking=RequestOptions(model="third"))


def test_no_server_is_said_plainly() -> None:
    settings = ServingBenchConfig("http://127.0.0.1:9", RequestOptions(model=""))
    with pytest.raises(MissingDependency, match="no server at"):
        run_serving_bench(settings, [_turn(1)], "", lambda *_: None)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "h:1"])
def test_addresses_with_and_without_a_version_are_the_same(url: str) -> None:
    assert parse_base_url(url) == "http://h:1"


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://me:secret@h"])
def test_addresses_that_cannot_be_asked_are_refused(url: str) -> None:
    with pytest.raises(InputError) as refused:
        parse_base_url(url)
    assert "secret" not in str(refused.value)


def test_words_of_several_tokens_are_left_out(fake: FakeServer) -> None:
    async def words() -> tuple[str, ...]:
        async with aiohttp.ClientSession() as session:
            return (
                await find_single_token_words(
                    session, await probe_server(session, fake.url, None), "chat"
                )
            ).words

    assert {fake.count(word) for word in asyncio.run(words())} == {1}


def test_bodies_are_made_ahead_but_not_without_end() -> None:
    made = []

    def endless() -> Iterator[PreparedRequest]:
        for index in range(1000):
            made.append(index)
            yield PreparedRequest(index, 0.0, b"x" * 10, 1, 1)

    found = [one.request_index for one in islice(prefetch_requests(endless(), most_bytes=100), 5)]
    assert found == [0, 1, 2, 3, 4]
    assert len(made) < 20
    made.clear()
    assert len(list(islice(prefetch_requests(endless(), most=3), 5))) == 5
    assert len(made) < 10
    assert [one.request_index for one in prefetch_requests(endless(), most_bytes=1)] == list(
        range(1000)
    )


def test_the_generator_says_when_it_was_the_bottleneck() -> None:
    assert not GeneratorStats(
        send_delay_p99_s=0.001, event_loop_lag_p99_s=0.001, cpu_share=0.5
    ).bottleneck
    assert "client CPU 95 % of one core" in GeneratorStats(cpu_share=0.95).bottleneck
    assert "client send delay p99 50 ms" in GeneratorStats(send_delay_p99_s=0.05).bottleneck
    assert "client event-loop lag p99 60 ms" in GeneratorStats(event_loop_lag_p99_s=0.06).bottleneck
