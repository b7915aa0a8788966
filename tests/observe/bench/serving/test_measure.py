"""The load generator against a server in this process: what it saw is what the server did."""

import asyncio
import os
import signal
from collections.abc import Iterator
from itertools import islice

import aiohttp
import pytest

from meshwright.errors import InputError, MissingPart
from meshwright.observe.bench.serving.drive import Generator, Pace, ahead
from meshwright.observe.bench.serving.measure import Measured, Settings, Turn, measure
from meshwright.observe.bench.serving.served import Served
from meshwright.observe.bench.serving.server import base_of, meet, word_counts
from meshwright.observe.bench.serving.stream import Prepared
from meshwright.observe.bench.serving.wire import Api, Asking
from meshwright.spec.workload import Request
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
) -> Turn:
    def draw() -> Iterator[Request]:
        for number in range(count):
            yield Request(
                arrival_s=number * gap_s, prompt_tokens=prompt + number % 3, output_tokens=output
            )

    return Turn("a load", draw, None if in_flight else 10.0, in_flight)


def _measured(
    fake: FakeServer, *turns: Turn, asking: Asking | None = None, **more: object
) -> Measured:
    given: dict[str, object] = {"warm_up": 0, "timeout_s": 20.0} | more
    settings = Settings(fake.url, asking or Asking(model=""), **given)  # type: ignore[arg-type]
    return measure(settings, turns, "mw bench serve", lambda *_: None)


def test_every_request_is_answered_with_its_own_tokens_in_full(fake: FakeServer) -> None:
    asking = Asking(model="", ids=True)
    (run,) = _measured(fake, _turn(30), asking=asking, keep=True).result.runs
    assert [one.index for one in run.requests] == list(range(30))
    bodies = [said.body for said in fake.written]
    answers = {tuple(body["prompt"]): fake.answer_to(body["prompt"], 6) for body in bodies}
    assert sorted(tuple(v) for v in answers.values()) == sorted(
        one.answer for one in run.requests if isinstance(one.answer, tuple)
    )
    for one in run.requests:
        assert (one.fault, one.output_tokens, one.finish) == ("", 6, "length")
        assert one.prompt_tokens == one.asked_prompt
        assert len(one.pieces_us) == 6
        assert one.cached_tokens == one.asked_prompt // 4


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
    assert run.generator.most_in_flight == 5


def test_an_open_loop_sends_whether_or_not_answers_have_come(fake: FakeServer) -> None:
    fake.first_s = 0.2
    (run,) = _measured(fake, _turn(12, in_flight=None, gap_s=0.001)).result.runs
    assert fake.most_open == 12
    assert all(one.sent_s >= one.due_s for one in run.requests)
    assert [one.due_s for one in run.requests] == pytest.approx([0.001 * n for n in range(12)])


def test_nothing_is_sent_after_the_duration(fake: FakeServer) -> None:
    fake.gap_s = 0.002
    for in_flight in (2, None):
        turn = _turn(100_000, in_flight=in_flight, gap_s=0.01)
        (run,) = _measured(fake, turn, duration_s=0.15).result.runs
        assert 0 < len(run.requests) < 1000
        assert all(one.due_s < 0.15 for one in run.requests)


def test_a_ramp_is_not_counted(fake: FakeServer) -> None:
    turn = _turn(40, in_flight=None, gap_s=0.01)
    (run,) = _measured(fake, turn, ramp_s=0.2).result.runs
    assert {one.counted for one in run.requests} == {False, True}
    assert all(one.counted == (one.sent_s >= 0.2) for one in run.requests)


def test_a_ramp_grows_evenly_to_the_full_rate() -> None:
    pace = Pace(ramp_s=10.0)
    due = [pace.due_s(number / 100) for number in range(2000)]
    assert due == sorted(due)
    halves = [sum(a <= at < a + 5 for at in due) for a in (0, 5, 10)]
    assert halves == [pytest.approx(125, abs=1), pytest.approx(375, abs=1), 500]


@pytest.mark.parametrize("in_flight", [2, None])
def test_an_interrupt_keeps_what_was_sent(fake: FakeServer, in_flight: int | None) -> None:
    before = signal.getsignal(signal.SIGINT)

    def answered(_: Turn, served: Served) -> None:
        if served.index == 5:
            os.kill(os.getpid(), signal.SIGINT)

    settings = Settings(fake.url, Asking(model=""), warm_up=0)
    turns = [_turn(10_000, in_flight=in_flight, gap_s=0.01)] * 2
    result = measure(settings, turns, "mw bench serve", answered).result
    (run,) = result.runs
    assert result.interrupted
    assert 5 < len(run.requests) < 1000
    assert {one.fault for one in run.requests} == {""}
    assert signal.getsignal(signal.SIGINT) is before


def test_the_warm_up_has_other_prompts_and_is_no_part_of_the_result(fake: FakeServer) -> None:
    (run,) = _measured(fake, _turn(5), warm_up=3).result.runs
    assert len(run.requests) == 5
    prompts = [tuple(said.body["prompt"]) for said in fake.written]
    assert len(set(prompts)) == 8


def test_the_same_seed_asks_the_same_and_runs_ask_different_things(fake: FakeServer) -> None:
    def asked(seed: int, *turns: Turn) -> list[tuple[int, ...]]:
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
    failed = [one for one in run.requests if one.fault]
    assert [one.fault for one in failed] == [cause] * 2
    assert all(detail in one.detail for one in failed)
    assert len(run.requests) == 6


def test_nothing_more_is_sent_where_nothing_succeeds(fake: FakeServer) -> None:
    fake.fault = "busy"
    (run,) = _measured(fake, _turn(500, in_flight=10)).result.runs
    assert run.gave_up
    assert len(run.requests) < 100


def test_a_warm_up_that_fails_ends_the_bench_with_the_reason(fake: FakeServer) -> None:
    fake.fault = "busy"
    with pytest.raises(InputError, match="HTTP 429: too many requests"):
        _measured(fake, _turn(5), warm_up=2)


def test_pieces_of_several_tokens_are_counted_by_the_server(fake: FakeServer) -> None:
    fake.each = 4
    (run,) = _measured(fake, _turn(1, output=10)).result.runs
    assert run.requests[0].piece_tokens == (4, 4, 2)
    fake.tells_counts = False
    (run,) = _measured(fake, _turn(1, output=10)).result.runs
    assert run.requests[0].piece_tokens == ()
    assert run.requests[0].output_tokens == 10


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_texts_have_exact_token_counts_too(fake: FakeServer, api: Api) -> None:
    found = _measured(fake, _turn(6, prompt=40), asking=Asking(model="", api=api), text=True)
    (run,) = found.result.runs
    assert [one.prompt_tokens for one in run.requests] == [40, 41, 42] * 2
    assert found.wording is not None
    assert found.wording.counted


def test_letters_take_the_place_of_words_where_tokens_are_bytes(fake: FakeServer) -> None:
    fake.bytewise = True
    (run,) = _measured(fake, _turn(3, prompt=40), asking=Asking(model="", api="chat")).result.runs
    assert [one.prompt_tokens for one in run.requests] == [40, 41, 42]


def test_without_a_tokenizer_a_word_is_taken_for_a_token(fake: FakeServer) -> None:
    fake.tokenizes = False
    found = _measured(fake, _turn(2), text=True)
    assert found.wording is not None
    assert not found.wording.counted
    assert len(fake.written[0].body["prompt"].split()) in (20, 21)


def test_answers_under_load_are_those_given_alone(fake: FakeServer) -> None:
    asking = Asking(model="", ids=True)
    echo = _measured(fake, _turn(20, in_flight=20), asking=asking, echo=True).echo
    assert echo == (20, (), ())


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_streams_at_once_keep_their_tokens_apart(fake: FakeServer, count: int) -> None:
    fake.first_s = count / 1000
    asking = Asking(model="", ids=True)
    turn = _turn(count, in_flight=count, output=3)
    (run,) = _measured(fake, turn, asking=asking, keep=True).result.runs
    assert fake.most_open == count
    assert {one.fault for one in run.requests} == {""}
    wanted = {tuple(fake.answer_to(said.body["prompt"], 3)) for said in fake.written}
    assert {one.answer for one in run.requests} == wanted


def test_the_key_is_sent(fake: FakeServer) -> None:
    _measured(fake, _turn(1), key="secret")
    assert fake.written[0].headers["Authorization"] == "Bearer secret"


def test_the_server_says_what_it_is(fake: FakeServer) -> None:
    server = _measured(fake, _turn(1)).result.server
    assert (server.model, server.software, server.max_length) == ("fake", "tests 1.2", 4096)
    assert _measured(fake, _turn(1), asking=Asking(model="other")).result.server.model == "other"
    with pytest.raises(InputError, match="use one of fake, other"):
        _measured(fake, _turn(1), asking=Asking(model="third"))


def test_no_server_is_said_plainly() -> None:
    settings = Settings("http://127.0.0.1:9", Asking(model=""))
    with pytest.raises(MissingPart, match="no server answers"):
        measure(settings, [_turn(1)], "", lambda *_: None)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "h:1"])
def test_addresses_with_and_without_a_version_are_the_same(url: str) -> None:
    assert base_of(url) == "http://h:1"


@pytest.mark.parametrize("url", ["ftp://h", "http://", "http://me:secret@h"])
def test_addresses_that_cannot_be_asked_are_refused(url: str) -> None:
    with pytest.raises(InputError) as refused:
        base_of(url)
    assert "secret" not in str(refused.value)


def test_words_of_several_tokens_are_left_out(fake: FakeServer) -> None:
    async def words() -> tuple[str, ...]:
        async with aiohttp.ClientSession() as session:
            return (await word_counts(session, await meet(session, fake.url, None), "chat")).words

    assert {fake.count(word) for word in asyncio.run(words())} == {1}


def test_bodies_are_made_ahead_but_not_without_end() -> None:
    made = []

    def endless() -> Iterator[Prepared]:
        for index in range(1000):
            made.append(index)
            yield Prepared(index, 0.0, b"x" * 10, 1, 1)

    found = [one.number for one in islice(ahead(endless(), most_bytes=100), 5)]
    assert found == [0, 1, 2, 3, 4]
    assert len(made) < 20
    made.clear()
    assert len(list(islice(ahead(endless(), most=3), 5))) == 5
    assert len(made) < 10
    assert [one.number for one in ahead(endless(), most_bytes=1)] == list(range(1000))


def test_the_generator_says_when_it_was_the_bottleneck() -> None:
    assert not Generator(late_p99_s=0.001, lag_p99_s=0.001, cpu_share=0.5).bottleneck
    assert "95% of its core" in Generator(cpu_share=0.95).bottleneck
    assert "50 ms late" in Generator(late_p99_s=0.05).bottleneck
    assert "woke 60 ms late" in Generator(lag_p99_s=0.06).bottleneck
