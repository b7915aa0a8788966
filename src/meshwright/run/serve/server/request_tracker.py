"""An ask on its way through the engine: its pieces as they come, and what is counted of them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from time import monotonic
from typing import Protocol, runtime_checkable

from meshwright.errors import InputError, MeshwrightError
from meshwright.run.serve.engine_client import EngineClient
from meshwright.run.serve.request import Request, RequestOutput
from meshwright.run.serve.server.admission import AdmissionController, RequestContext
from meshwright.run.serve.server.api_errors import ApiError, unservable_request
from meshwright.run.serve.server.metrics import ServerMetrics
from meshwright.run.serve.server.protocol.response_schema import PromptTokensDetails, UsageInfo
from meshwright.run.serve.server.tracing import TraceSpan


@runtime_checkable
class BufferedOutputs(Protocol):
    """An iterator of pieces that also hands out at once what is there already."""

    def take_available(self) -> Sequence[RequestOutput]:
        """Return the pieces that nobody has to wait for."""


class RequestTracker:
    """Follows one ask until each of its choices has ended."""

    def __init__(
        self,
        engine: EngineClient,
        request: Request,
        metrics: ServerMetrics,
        admission: AdmissionController,
        context: RequestContext,
    ) -> None:
        self.request = request
        self.output_tokens = 0
        self.cached_tokens = 0
        self._lengths = [0] * request.sampling_params.n
        self._figures = metrics
        self._traffic = admission
        self._call = context
        self._asked_at = monotonic()
        self._first_at: float | None = None
        self._queued_s: float | None = None
        self._last_at = [0.0] * request.sampling_params.n
        self._open = request.sampling_params.n
        self._end = "abort"
        self._fault: ApiError | None = None
        self._closed = False
        self._pieces: AsyncIterator[RequestOutput] = engine.generate(request)
        self._next = self._pieces.__anext__
        self._ready = (
            self._pieces.take_available if isinstance(self._pieces, BufferedOutputs) else None
        )
        admission.record_queued()
        context.prompt_tokens += len(request.prompt_token_ids)
        metrics.n_param.observe(request.sampling_params.n)
        if request.sampling_params.max_tokens is not None:
            metrics.max_tokens_param.observe(request.sampling_params.max_tokens)

    async def next_outputs(self) -> Sequence[RequestOutput]:
        """Return the next pieces: at least one, or none where the answer is whole."""
        if self._fault is not None:
            raise self._fault
        if not self._open:
            return ()
        try:
            piece = await self._next()
        except StopAsyncIteration:
            self._end = "error"
            raise ApiError(500, "The engine ended before the answer was whole") from None
        except InputError as error:
            self._end = "error"
            raise unservable_request(error, fields=self._call.field_names) from None
        except MeshwrightError as error:
            self._end = "error"
            raise ApiError(503, str(error), code="engine_error", retry_after_s=10) from None
        now = monotonic()
        # A request that fails before its first token has no time to it.
        if self._first_at is None and piece.finish_reason not in {"error", "abort"}:
            self._record_first_token(piece, now)
        self._record_output(piece, now)
        if self._ready is None or not (more := self._ready()):
            return (piece,)
        whole = [piece]
        try:
            for another in more:
                self._record_output(another, now)
                whole.append(another)
        except ApiError as fault:
            # What came before is told first.
            self._fault = fault
        return whole

    def _record_first_token(self, output: RequestOutput, now: float) -> None:
        self._first_at = now
        self._queued_s = output.queue_s
        self.cached_tokens = output.cached_tokens
        self._traffic.record_first_token()
        self._figures.time_to_first_token.observe(now - self._asked_at)

    def _record_output(self, output: RequestOutput, now: float) -> None:
        choice = output.index
        if output.token_ids:
            self.output_tokens += len(output.token_ids)
            self._lengths[choice] += len(output.token_ids)
            if last := self._last_at[choice]:
                self._figures.inter_token_latency.observe(now - last)
            self._last_at[choice] = now
        if output.finish_reason is not None:
            self._open -= 1
            self._end = output.finish_reason
            if output.is_request_error:
                raise ApiError(400, output.error, param="structured_outputs", code="grammar_error")
            if output.finish_reason == "error":
                raise ApiError(500, output.error or "The engine failed", code="engine_error")
            if output.finish_reason == "abort":
                what = output.error or "Request was aborted by the engine."
                raise ApiError(503, what, code="request_aborted")

    async def close(self) -> None:
        """Let go of it: what is left of the answer is cancelled, and the rest is counted."""
        if self._closed:
            return
        self._closed = True
        if self._first_at is None:
            self._traffic.record_early_end()
        self._call.output_tokens += self.output_tokens
        self._record_finished()
        if isinstance(self._pieces, Closable):
            await self._pieces.aclose()

    def _record_finished(self) -> None:
        now = monotonic()
        figures = self._figures
        whole = self._end in {"stop", "length"} and not self._open
        figures.finish_reasons[self._end if whole or self._end == "error" else "abort"] += 1
        if not whole or self._first_at is None:
            return
        decode_s = max(self._last_at) - self._first_at
        figures.e2e_latency.observe(now - self._asked_at)
        figures.decode_time.observe(max(decode_s, 0.0))
        figures.prompt_tokens.observe(len(self.request.prompt_token_ids))
        figures.generation_tokens.observe(self.output_tokens)
        figures.max_generation_tokens.observe(max(self._lengths))
        after_first = self.output_tokens - self.request.sampling_params.n
        if after_first > 0:
            figures.time_per_output_token.observe(
                decode_s * self.request.sampling_params.n / after_first
            )
        if self._queued_s is not None:
            placed_at = self._asked_at + self._queued_s
            figures.queue_time.observe(self._queued_s)
            figures.prefill_time.observe(max(self._first_at - placed_at, 0.0))
            figures.inference_time.observe(max(now - placed_at, 0.0))

    def annotate_span(self, span: TraceSpan) -> None:
        """Say on the request's span what this ask was and what it took."""
        sampling = self.request.sampling_params
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
class Closable(Protocol):
    """An iterator that can be given up."""

    async def aclose(self) -> None:
        """Give it up."""


class RequestTrackerGroup:
    """Several asks of one request; a choice is counted through all of them."""

    def __init__(self, trackers: list[RequestTracker], choices: int) -> None:
        self.trackers = trackers
        self.hide_output = False
        """Whether the tokens that come are shown to nobody, and not counted for anybody."""
        self._choices = choices
        self._tasks: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[tuple[int, Sequence[RequestOutput]] | BaseException] = (
            asyncio.Queue()
        )
        self._left = 0

    async def next_outputs(self) -> tuple[int, Sequence[RequestOutput]]:
        """Return the number of the first choice of an ask and pieces of it; no pieces at the end.

        The asks are under way from the first call on.
        """
        if len(self.trackers) == 1:
            return 0, await self.trackers[0].next_outputs()
        if not self._tasks:
            self._left = len(self.trackers)
            self._tasks = [
                asyncio.create_task(self._follow(at, reply))
                for at, reply in enumerate(self.trackers)
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

    async def _follow(self, at: int, reply: RequestTracker) -> None:
        try:
            while pieces := await reply.next_outputs():
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
        for reply in self.trackers:
            await reply.close()

    def annotate_span(self, span: TraceSpan) -> None:
        """Say on the request's span what it asked for; of several asks the first speaks."""
        usage = self.build_usage()
        span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        if self.trackers:
            self.trackers[0].annotate_span(span)

    def build_usage(self, sent: int | None = None) -> UsageInfo:
        """Return the counts of tokens so far; `sent` are those of the answers, where not all."""
        prompt = sum(len(reply.request.prompt_token_ids) for reply in self.trackers)
        came = sum(reply.output_tokens for reply in self.trackers) if sent is None else sent
        output = 0 if self.hide_output else came
        cached = sum(reply.cached_tokens for reply in self.trackers)
        return UsageInfo(prompt, output, prompt + output, PromptTokensDetails(cached))
