"""`AppState`: what every endpoint works with."""

import time
from collections.abc import Sequence

from meshwright.errors import InputError
from meshwright.run.serve.engine_client import EngineClient, SleepableEngine
from meshwright.run.serve.request import Request
from meshwright.run.serve.server.admission import AdmissionController, RequestContext
from meshwright.run.serve.server.api_errors import ApiError, unservable_request
from meshwright.run.serve.server.api_keys import ApiKeys, read_api_keys
from meshwright.run.serve.server.metrics import ServerMetrics
from meshwright.run.serve.server.protocol.output_parsers import OutputParserFactory
from meshwright.run.serve.server.protocol.request_schema import StreamOptions
from meshwright.run.serve.server.request_tracker import RequestTracker, RequestTrackerGroup
from meshwright.run.serve.server.server_config import ServerConfig
from meshwright.run.serve.server.sse import EventSource, UsageReporting
from meshwright.run.serve.server.tracing import RequestTracer
from meshwright.run.serve.tokenizer.tokenizer_like import TokenizerLike

ResponseBody = bytes | EventSource
"""A body of JSON, or events as they come."""


class AppState:
    """The engine, its words, the settings, and what is counted."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: TokenizerLike,
        config: ServerConfig,
        tracer: RequestTracer | None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.tracer = tracer
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

    def submit(self, requests: Sequence[Request], context: RequestContext) -> RequestTrackerGroup:
        """Put asks to the engine, if there is room for them."""
        self.require_ready()
        self.admission.check_capacity()
        replies = RequestTrackerGroup([], requests[0].sampling_params.n)
        context.open_resources.append(replies)
        for ask in requests:
            try:
                reply = RequestTracker(self.engine, ask, self.metrics, self.admission, context)
            except InputError as error:
                raise unservable_request(error, fields=context.field_names) from None
            replies.trackers.append(reply)
        return replies

    def usage_reporting(self, options: StreamOptions | None) -> UsageReporting:
        """Return when a stream tells the counts of tokens."""
        if options is None or not (options.include_usage or options.continuous_usage_stats):
            return "never"
        return "always" if options.continuous_usage_stats else "last"
