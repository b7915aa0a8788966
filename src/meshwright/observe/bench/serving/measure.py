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

from meshwright.errors import InputError, MissingPart, Problem
from meshwright.observe.bench.serving.drive import Driven, Pace, allow_many_files, drive
from meshwright.observe.bench.serving.echo import Echo, compare_answers, in_all
from meshwright.observe.bench.serving.prompts import Prompts, text_of
from meshwright.observe.bench.serving.result import Result, Run, here, today
from meshwright.observe.bench.serving.served import Served
from meshwright.observe.bench.serving.server import Server, Wording, base_of, meet, word_counts
from meshwright.observe.bench.serving.stream import Line, Prepared
from meshwright.observe.bench.serving.wire import PATHS, Asking
from meshwright.spec.workload import Request

if TYPE_CHECKING:
    import aiohttp


KEPT_OPEN_S = 2.0
"""Idle connections are closed before servers do so, most after 5 s: a request sent at that moment
would be lost."""


class Turn(NamedTuple):
    """One load to put on a server."""

    name: str
    draw: Callable[[], Iterator[Request]]
    """Returns its requests, the same ones every time."""
    rate_per_s: float | None = None
    in_flight: int | None = None


class Settings(NamedTuple):
    """How a server is asked."""

    url: str
    asking: Asking
    """Its model may be empty: then the first that the server names."""
    key: str = ""
    """The server's API key; it is sent, and kept nowhere."""
    text: bool = False
    """Prompts are texts, not tokens; those of chats always are."""
    vocabulary: int = 10_000
    seed: int = 0
    warm_up: int = 8
    ramp_s: float = 0.0
    duration_s: float | None = None
    timeout_s: float = 600.0
    echo: bool = False
    """Ask everything again, one at a time, and compare the answers."""
    keep: bool = False
    """Keep whole answers."""


class Measured(NamedTuple):
    """What a bench found."""

    result: Result
    wording: Wording | None
    echo: Echo | None


Say = Callable[[Turn, Served], None]


def measure(settings: Settings, turns: Sequence[Turn], command: str, say: Say) -> Measured:
    """Put all loads on a server, one after another."""
    try:
        import aiohttp  # noqa: F401 - said before anything is begun
    except ModuleNotFoundError:
        hint = "pip install 'meshwright[load]'"
        raise MissingPart(
            "mw bench serve asks with aiohttp, which is not installed", hint
        ) from None
    allow_many_files()
    with asyncio.Runner(loop_factory=_quick_loop()) as runner:
        return runner.run(_measure(settings, turns, command, say))


def _quick_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's event loop, which needs half the time for a token, where it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return None
    return uvloop.new_event_loop


def _session(settings: Settings) -> "aiohttp.ClientSession":
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_OPEN_S),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=settings.timeout_s, sock_connect=None),
        headers={"Authorization": f"Bearer {settings.key}"} if settings.key else None,
    )


async def _measure(settings: Settings, turns: Sequence[Turn], command: str, say: Say) -> Measured:
    date, (machine, software) = today(), here()
    async with _session(settings) as session:
        server = await meet(session, base_of(settings.url), settings.asking.model or None)
        maker = await _maker(session, server, settings)
        line = Line(session, server.url + PATHS[maker.asking.api], settings.keep)
        if settings.warm_up:
            await _warm_up(line, maker, turns[0], settings.warm_up)
        runs, echoes = list[Run](), list[Echo]()
        with _stopped_by_signal() as stop:
            for number, turn in enumerate(turns):
                if stop.is_set():
                    break
                told = partial(say, turn)
                driven = await drive(
                    line, maker.prepared(turn, number), _pace(settings, turn), told, stop
                )
                runs.append(_run(turn, driven))
                if settings.echo:
                    again = _only(maker.prepared(turn, number), driven.served)
                    alone = await drive(line, again, Pace(in_flight=1), told, stop)
                    echoes.append(compare_answers(driven.served, alone.served))
    result = Result(
        command=command,
        date=date,
        seed=settings.seed,
        server=server,
        asking=maker.asking,
        machine=machine,
        software=software,
        runs=tuple(runs),
        interrupted=stop.is_set(),
    )
    return Measured(result, maker.wording, in_all(echoes) if echoes else None)


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


class _Maker(NamedTuple):
    """Makes the bodies of requests."""

    asking: Asking
    wording: Wording | None
    settings: Settings

    def prepared(self, turn: Turn, number: int | str) -> Iterator[Prepared]:
        """Yield the requests of a load, ready to be sent."""
        wording = self.wording
        # Words are drawn by number, as tokens are.
        size = self.settings.vocabulary if wording is None else 1 << 20
        prompts = Prompts(f"{self.settings.seed}/{number}", size)
        for index, request in enumerate(turn.draw()):
            ids = prompts.ids(index, request)
            prompt: list[int] | str
            if wording is None:
                prompt = ids.tolist()
            else:
                ids = ids[: max(1, len(ids) - wording.added)]
                prompt = text_of(ids, wording.words, wording.between)
            output = max(1, request.output_tokens)
            body = self.asking.body(prompt, output, self.settings.seed + index)
            yield Prepared(index, request.arrival_s, body, request.prompt_tokens, output)


async def _maker(session: "aiohttp.ClientSession", server: Server, settings: Settings) -> _Maker:
    asking = msgspec.structs.replace(settings.asking, model=server.model)
    if settings.text or asking.api == "chat":
        return _Maker(asking, await word_counts(session, server, asking.api), settings)
    return _Maker(asking, None, settings)


async def _warm_up(line: Line, maker: _Maker, turn: Turn, count: int) -> None:
    requests = islice(maker.prepared(turn, "warm-up"), count)
    driven = await drive(line, requests, Pace(in_flight=count), lambda _: None)
    if driven.served and all(served.fault for served in driven.served):
        first = driven.served[0]
        what = f"answers no request: {first.fault}: {first.detail}"
        fix = "mend what it says; --vocabulary, --prompt, --plain and --api change what is sent"
        raise InputError([Problem(line.url, what, fix)])


def _pace(settings: Settings, turn: Turn) -> Pace:
    return Pace(in_flight=turn.in_flight, ramp_s=settings.ramp_s, duration_s=settings.duration_s)


def _only(requests: Iterator[Prepared], served: Sequence[Served]) -> Iterator[Prepared]:
    """Yield the requests that were sent; a duration may have left out the rest."""
    sent = {one.index for one in served}
    last = max(sent, default=-1)
    return (one for one in islice(requests, last + 1) if one.number in sent)


def _run(turn: Turn, driven: Driven) -> Run:
    return Run(
        name=turn.name,
        rate_per_s=turn.rate_per_s,
        in_flight=turn.in_flight,
        began_unix_s=driven.began_unix_s,
        requests=driven.served,
        generator=driven.generator,
        gave_up=driven.gave_up,
    )
