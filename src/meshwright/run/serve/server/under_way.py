"""An ask on its way through the engine: its pieces as they come, and what is counted of them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from time import monotonic
from typing import Protocol, runtime_checkable

from meshwright.errors import InputError, MeshwrightError
from meshwright.run.serve.asked import Ask, Piece
from meshwright.run.serve.interface import Serves
from meshwright.run.serve.server.faults import Fault, impossible
from meshwright.run.serve.server.metrics import Figures
from meshwright.run.serve.server.replies import PromptDetails, Usage
from meshwright.run.serve.server.spans import Span
from meshwright.run.serve.server.traffic import Call, Traffic


@runtime_checkable
class Ready(Protocol):
    """An iterator of pieces that also hands out at once what is there already."""

    def ready(self) -> Sequence[Piece]:
        """Return the pieces that nobody has to wait for."""


class Reply:
    """Follows one ask until each of its choices has ended."""

    def __init__(
        self, engine: Serves, ask: Ask, figures: Figures, traffic: Traffic, call: Call
    ) -> None:
        self.ask = ask
        self.output_tokens = 0
        self.cached_tokens = 0
        self._lengths = [0] * ask.sampling.n
        self._figures = figures
        self._traffic = traffic
        self._call = call
        self._asked_at = monotonic()
        self._first_at: float | None = None
        self._queued_s: float | None = None
        self._last_at = [0.0] * ask.sampling.n
        self._open = ask.sampling.n
        self._end = "abort"
        self._fault: Fault | None = None
        self._closed = False
        self._pieces: AsyncIterator[Piece] = engine.answer(ask)
        self._next = self._pieces.__anext__
        self._ready = self._pieces.ready if isinstance(self._pieces, Ready) else None
        traffic.asked()
        call.prompt_tokens += len(ask.prompt)
        figures.choices.add(ask.sampling.n)
        if ask.sampling.max_tokens is not None:
            figures.asked_length.add(ask.sampling.max_tokens)

    async def some(self) -> Sequence[Piece]:
        """Return the next pieces: at least one, or none where the answer is whole."""
        if self._fault is not None:
            raise self._fault
        if not self._open:
            return ()
        try:
            piece = await self._next()
        except StopAsyncIteration:
            self._end = "error"
            raise Fault(500, "The engine ended before the answer was whole") from None
        except InputError as error:
            self._end = "error"
            raise impossible(error, fields=self._call.fields) from None
        except MeshwrightError as error:
            self._end = "error"
            raise Fault(503, str(error), code="engine_error", retry_s=10) from None
        now = monotonic()
        # A request that fails before its first token has no time to it.
        if self._first_at is None and piece.finish not in {"error", "cancelled"}:
            self._note_first(piece, now)
        self._note(piece, now)
        if self._ready is None or not (more := self._ready()):
            return (piece,)
        whole = [piece]
        try:
            for another in more:
                self._note(another, now)
                whole.append(another)
        except Fault as fault:
            # What came before is told first.
            self._fault = fault
        return whole

    def _note_first(self, piece: Piece, now: float) -> None:
        self._first_at = now
        self._queued_s = piece.queued_s
        self.cached_tokens = piece.cached_tokens
        self._traffic.first()
        self._figures.first_token.add(now - self._asked_at)

    def _note(self, piece: Piece, now: float) -> None:
        choice = piece.choice
        if piece.tokens:
            self.output_tokens += len(piece.tokens)
            self._lengths[choice] += len(piece.tokens)
            if last := self._last_at[choice]:
                self._figures.next_token.add(now - last)
            self._last_at[choice] = now
        if piece.finish is not None:
            self._open -= 1
            self._end = piece.finish
            if piece.finish == "error":
                raise Fault(500, piece.error or "The engine failed", code="engine_error")
            if piece.finish == "cancelled":
                raise Fault(503, piece.error or "The engine gave the request up", code="cancelled")

    async def close(self) -> None:
        """Let go of it: what is left of the answer is cancelled, and the rest is counted."""
        if self._closed:
            return
        self._closed = True
        if self._first_at is None:
            self._traffic.abandoned()
        self._call.output_tokens += self.output_tokens
        self._count()
        if isinstance(self._pieces, Closes):
            await self._pieces.aclose()

    def _count(self) -> None:
        now = monotonic()
        figures = self._figures
        whole = self._end in {"stop", "length"} and not self._open
        figures.ends[self._end if whole or self._end == "error" else "abort"] += 1
        if not whole or self._first_at is None:
            return
        decode_s = max(self._last_at) - self._first_at
        figures.whole.add(now - self._asked_at)
        figures.decode.add(max(decode_s, 0.0))
        figures.prompt_length.add(len(self.ask.prompt))
        figures.answer_length.add(self.output_tokens)
        figures.longest_answer.add(max(self._lengths))
        after_first = self.output_tokens - self.ask.sampling.n
        if after_first > 0:
            figures.mean_token.add(decode_s * self.ask.sampling.n / after_first)
        if self._queued_s is not None:
            placed_at = self._asked_at + self._queued_s
            figures.queued.add(self._queued_s)
            figures.prefill.add(max(self._first_at - placed_at, 0.0))
            figures.inference.add(max(now - placed_at, 0.0))

    def tell(self, span: Span) -> None:
        """Say on the request's span what this ask was and what it took."""
        sampling = self.ask.sampling
        span.set_attribute("gen_ai.request.max_tokens", sampling.max_tokens or 0)
        span.set_attribute("gen_ai.request.temperature", sampling.temperature)
        span.set_attribute("gen_ai.request.top_p", sampling.top_p)
        span.set_attribute("gen_ai.request.n", sampling.n)
        if self._first_at is not None:
            waited_s = self._first_at - self._asked_at
            span.set_attribute("gen_ai.latency.time_to_first_token", waited_s)
        if self._queued_s is not None:
            span.set_attribute("gen_ai.latency.time_in_queue", self._queued_s)
        span.set_attribute("gen_ai.latency.e2e", monotonic() - self._asked_at)


@runtime_checkable
class Closes(Protocol):
    """An iterator that can be given up."""

    async def aclose(self) -> None:
        """Give it up."""


class Replies:
    """Several asks of one request; a choice is counted through all of them."""

    def __init__(self, each: list[Reply], choices: int) -> None:
        self.each = each
        self.silent = False
        """Whether the tokens that come are shown to nobody, and not counted for anybody."""
        self._choices = choices
        self._tasks: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[tuple[int, Sequence[Piece]] | BaseException] = asyncio.Queue()
        self._left = 0

    async def some(self) -> tuple[int, Sequence[Piece]]:
        """Return the number of the first choice of an ask and pieces of it; no pieces at the end.

        The asks are under way from the first call on.
        """
        if len(self.each) == 1:
            return 0, await self.each[0].some()
        if not self._tasks:
            self._left = len(self.each)
            self._tasks = [
                asyncio.create_task(self._follow(at, reply)) for at, reply in enumerate(self.each)
            ]
        while self._left:
            got = await self._queue.get()
            if isinstance(got, BaseException):
                raise got
            at, pieces = got
            if pieces:
                return at * self._choices, pieces
            self._left -= 1
        return 0, ()

    async def _follow(self, at: int, reply: Reply) -> None:
        try:
            while pieces := await reply.some():
                self._queue.put_nowait((at, pieces))
            self._queue.put_nowait((at, ()))
        except Exception as error:  # noqa: BLE001  whoever reads the queue gets it
            self._queue.put_nowait(error)

    async def close(self) -> None:
        """Let go of all."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        for reply in self.each:
            await reply.close()

    def tell(self, span: Span) -> None:
        """Say on the request's span what it asked for; of several asks the first speaks."""
        usage = self.usage()
        span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        if self.each:
            self.each[0].tell(span)

    def usage(self, sent: int | None = None) -> Usage:
        """Return the counts of tokens so far; `sent` are those of the answers, where not all."""
        prompt = sum(len(reply.ask.prompt) for reply in self.each)
        came = sum(reply.output_tokens for reply in self.each) if sent is None else sent
        output = 0 if self.silent else came
        cached = sum(reply.cached_tokens for reply in self.each)
        return Usage(prompt, output, prompt + output, PromptDetails(cached))
