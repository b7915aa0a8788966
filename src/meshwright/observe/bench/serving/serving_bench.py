"""A whole bench: meet the server, warm it up, put one load after another on it, check answers."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.observe.bench.serving.answer_check import AnswerCheck, compare_answers, sum_checks
from meshwright.observe.bench.serving.http_request import PreparedRequest, ServerConnection
from meshwright.observe.bench.serving.load_generator import (
    LoadPacing,
    LoadRun,
    raise_file_limit,
    send_load,
)
from meshwright.observe.bench.serving.openai_protocol import PATHS, RequestOptions
from meshwright.observe.bench.serving.random_prompts import RandomPrompts, ids_to_text
from meshwright.observe.bench.serving.request_result import RequestResult
from meshwright.observe.bench.serving.server_probe import (
    ServerInfo,
    TokenWords,
    find_single_token_words,
    parse_base_url,
    probe_server,
)
from meshwright.observe.bench.serving.serving_result import (
    ServingBenchResult,
    ServingBenchRun,
    describe_client,
    utc_now,
)
from meshwright.spec.workload import WorkloadRequest

if TYPE_CHECKING:
    import aiohttp


KEEPALIVE_TIMEOUT_S = 2.0
"""Idle connections are closed before servers do so, most after 5 s: a request sent at that moment
would be lost."""


class LoadPoint(NamedTuple):
    """One load to put on a server."""

    name: str
    make_requests: Callable[[], Iterator[WorkloadRequest]]
    """Returns its requests, the same ones every time."""
    request_rate: float | None = None
    max_concurrency: int | None = None


class ServingBenchConfig(NamedTuple):
    """How a server is asked."""

    url: str
    request_options: RequestOptions
    """Its model may be empty: then the first that the server names."""
    api_key: str = ""
    """The server's API key; it is sent, and kept nowhere."""
    text_prompts: bool = False
    """Prompts are texts, not tokens; those of chats always are."""
    vocab_size: int = 10_000
    seed: int = 0
    num_warmups: int = 8
    ramp_up_s: float = 0.0
    duration_s: float | None = None
    timeout_s: float = 600.0
    check_answers: bool = False
    """Ask everything again, one at a time, and compare the answers."""
    keep_answers: bool = False
    """Keep whole answers."""


class ServingBenchOutcome(NamedTuple):
    """What a bench found."""

    result: ServingBenchResult
    token_words: TokenWords | None
    answer_check: AnswerCheck | None


ReportProgress = Callable[[LoadPoint, RequestResult], None]


def run_serving_bench(
    settings: ServingBenchConfig, turns: Sequence[LoadPoint], command: str, say: ReportProgress
) -> ServingBenchOutcome:
    """Put all loads on a server, one after another."""
    try:
        import aiohttp  # noqa: F401 - said before anything is begun
    except ModuleNotFoundError:
        hint = "pip install 'meshwright[load]'"
        raise MissingDependency(
            "mw bench serve asks with aiohttp, which is not installed", hint
        ) from None
    raise_file_limit()
    with asyncio.Runner(loop_factory=_quick_loop()) as runner:
        return runner.run(_measure(settings, turns, command, say))


def _quick_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's event loop, which needs half the time for a token, where it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


def _session(settings: ServingBenchConfig) -> "aiohttp.ClientSession":
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_TIMEOUT_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=settings.timeout_s, sock_connect=None),
        headers={"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else None,
    )


async def _measure(
    settings: ServingBenchConfig, turns: Sequence[LoadPoint], command: str, say: ReportProgress
) -> ServingBenchOutcome:
    date, (machine, software) = utc_now(), describe_client()
    async with _session(settings) as session:
        server = await probe_server(
            session, parse_base_url(settings.url), settings.request_options.model or None
        )
        maker = await _maker(session, server, settings)
        line = ServerConnection(
            session, server.url + PATHS[maker.asking.api], settings.keep_answers
        )
        if settings.num_warmups:
            await _warm_up(line, maker, turns[0], settings.num_warmups)
        runs, echoes = list[ServingBenchRun](), list[AnswerCheck]()
        with _stopped_by_signal() as stop:
            for number, turn in enumerate(turns):
                if stop.is_set():
                    break
                told = partial(say, turn)
                driven = await send_load(
                    line, maker.prepared(turn, number), _pace(settings, turn), told, stop
                )
                runs.append(_run(turn, driven))
                if settings.check_answers:
                    again = _only(maker.prepared(turn, number), driven.results)
                    alone = await send_load(line, again, LoadPacing(max_concurrency=1), told, stop)
                    echoes.append(compare_answers(driven.results, alone.results))
    result = ServingBenchResult(
        command=command,
        date=date,
        seed=settings.seed,
        server=server,
        request_options=maker.asking,
        machine=machine,
        software=software,
        runs=tuple(runs),
        interrupted=stop.is_set(),
    )
    return ServingBenchOutcome(result, maker.wording, sum_checks(echoes) if echoes else None)


@contextmanager
def _stopped_by_signal() -> Iterator[asyncio.Event]:
    """Give what the first interrupt sets; the second one ends all at once."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)

    def interrupted() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)

    if threading.current_thread() is not threading.main_thread():  # none other hears of signals
        yield stop
        return
    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


class _RequestBuilder(NamedTuple):
    """Makes the bodies of requests."""

    asking: RequestOptions
    wording: TokenWords | None
    settings: ServingBenchConfig

    def prepared(self, turn: LoadPoint, number: int | str) -> Iterator[PreparedRequest]:
        """Yield the requests of a load, ready to be sent."""
        wording = self.wording
        # Words are drawn by number, as tokens are.
        size = self.settings.vocab_size if wording is None else 1 << 20
        prompts = RandomPrompts(f"{self.settings.seed}/{number}", size)
        for index, request in enumerate(turn.make_requests()):
            ids = prompts.generate_ids(index, request)
            prompt: list[int] | str
            if wording is None:
                prompt = ids.tolist()
            else:
                ids = ids[: max(1, len(ids) - wording.extra_tokens)]
                prompt = ids_to_text(ids, wording.words, wording.separator)
            output = max(1, request.output_tokens)
            body = self.asking.body(prompt, output, self.settings.seed + index)
            yield PreparedRequest(index, request.arrival_s, body, request.prompt_tokens, output)


async def _maker(
    session: "aiohttp.ClientSession", server: ServerInfo, settings: ServingBenchConfig
) -> _RequestBuilder:
    asking = msgspec.structs.replace(settings.request_options, model=server.model)
    if settings.text_prompts or asking.api == "chat":
        return _RequestBuilder(
            asking, await find_single_token_words(session, server, asking.api), settings
        )
    return _RequestBuilder(asking, None, settings)


async def _warm_up(
    line: ServerConnection, maker: _RequestBuilder, turn: LoadPoint, count: int
) -> None:
    requests = islice(maker.prepared(turn, "warm-up"), count)
    driven = await send_load(line, requests, LoadPacing(max_concurrency=count), lambda _: None)
    if driven.results and all(served.error for served in driven.results):
        first = driven.results[0]
        what = f"the server failed every request: {first.error}: {first.error_detail}"
        fix = "adjust --vocab-size, --prompt, --openai-only or --api, which change what is sent"
        raise InputError([Problem(line.url, what, fix)])


def _pace(settings: ServingBenchConfig, turn: LoadPoint) -> LoadPacing:
    return LoadPacing(
        max_concurrency=turn.max_concurrency,
        ramp_up_s=settings.ramp_up_s,
        duration_s=settings.duration_s,
    )


def _only(
    requests: Iterator[PreparedRequest], served: Sequence[RequestResult]
) -> Iterator[PreparedRequest]:
    """Yield the requests that were sent; a duration may have left out the rest."""
    sent = {one.index for one in served}
    last = max(sent, default=-1)
    return (one for one in islice(requests, last + 1) if one.request_index in sent)


def _run(turn: LoadPoint, driven: LoadRun) -> ServingBenchRun:
    return ServingBenchRun(
        name=turn.name,
        request_rate=turn.request_rate,
        max_concurrency=turn.max_concurrency,
        started_unix_s=driven.started_unix_s,
        requests=driven.results,
        generator=driven.generator_stats,
        aborted=driven.aborted,
    )
