"""`AppState`: what every endpoint works with."""

import asyncio
import time
from collections.abc import Sequence

import msgspec

from meshwright.errors import InputError
from meshwright.run.serve.engine_client import EngineClient, SleepableEngine
from meshwright.run.serve.request import Request
from meshwright.run.serve.server.admission import AdmissionController, RequestContext
from meshwright.run.serve.server.api_errors import ApiError, unservable_request
from meshwright.run.serve.server.api_keys import ApiKeys, read_api_keys
from meshwright.run.serve.server.input_processing.prepared_request import (
    InputLimits,
    InputProcessor,
    Prepared,
    RequestKind,
)
from meshwright.run.serve.server.metrics import ServerMetrics
from meshwright.run.serve.server.protocol.output_parsers import OutputParserFactory
from meshwright.run.serve.server.request_tracker import RequestTracker, RequestTrackerGroup
from meshwright.run.serve.server.server_config import ServerConfig
from meshwright.run.serve.server.sse import EventSource
from meshwright.run.serve.server.tracing import RequestTracer
from meshwright.run.serve.tokenizer.tokenizer_like import TokenizerLike

ResponseBody = bytes | EventSource
"""A body of JSON, or events as they come."""
TOKENS_BEFORE_PAUSE = 2**15
"""Tokens of prompts that are handed to the engine at a time."""


class AppState:
    """The engine, its words, the settings, and what is counted."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: TokenizerLike,
        config: ServerConfig,
        tracer: RequestTracer | None,
        input_processor: InputProcessor,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.tracer = tracer
        self.input_processor = input_processor
        self.api_keys: ApiKeys = read_api_keys(config.api_key_file, "MESHWRIGHT_API_KEY")
        self.admin_api_keys: ApiKeys = read_api_keys(
            config.admin_api_key_file, "MESHWRIGHT_ADMIN_API_KEY"
        )
        self.output_parsers = OutputParserFactory(
            tokenizer, config.tool_call_parser, reasoning=config.parse_reasoning
        )
        self.metrics = ServerMetrics(engine, config.model, config.lora_names)
        self.admission = AdmissionController(config.max_queued_requests)
        self.started_s = self.current_time_s()

    def current_time_s(self) -> int:
        """Return the second that answers carry."""
        return int(time.time())

    def require_ready(self) -> None:
        """Raise where the engine can answer nothing at the moment."""
        if isinstance(self.engine, SleepableEngine) and self.engine.is_sleeping():
            what = "Engine is sleeping. Call POST /wake_up first."
            raise ApiError(503, what, code="engine_sleeping")
        if reason := self.engine.health_problem():
            what = f"Engine is unhealthy: {reason}"
            raise ApiError(503, what, code="engine_unhealthy", retry_after_s=10)

    async def prepare(self, kind: RequestKind, data: bytes) -> Prepared:
        """Return what a body asks for."""
        if self.admission.is_draining:
            self.admission.check_capacity()
        limits = InputLimits(self.engine.max_model_len, self.engine.max_embed_len)
        return await self.input_processor.process(kind, data, limits)

    async def submit(
        self, requests: Sequence[Request], context: RequestContext
    ) -> RequestTrackerGroup:
        """Put requests to the engine, if there is room for them."""
        self.require_ready()
        self.admission.check_capacity()
        replies = RequestTrackerGroup([], requests[0].sampling_params.n)
        context.open_resources.append(replies)
        since_pause = 0
        for request in requests:
            since_pause += len(request.prompt_token_ids)
            if since_pause > TOKENS_BEFORE_PAUSE:
                # Handing tokens over takes time; streams go on in between.
                since_pause = 0
                await asyncio.sleep(0)
            tenant = context.tenant or request.tenant
            owned = msgspec.structs.replace(request, tenant=tenant)
            try:
                reply = RequestTracker(self.engine, owned, self.metrics, self.admission, context)
            except InputError as error:
                raise unservable_request(error, fields=context.field_names) from None
            replies.trackers.append(reply)
        return replies
