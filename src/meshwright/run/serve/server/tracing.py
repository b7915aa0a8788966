"""Traces of requests for OpenTelemetry, where its SDK is installed and an endpoint is set.

Attributes are those of the conventions for generative models; no prompt or answer is among them.
"""

import os
from collections.abc import Mapping
from typing import Any, Protocol

from meshwright.errors import MissingDependency
from meshwright.run.serve.server.api_errors import ApiError

OTLP_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class TraceSpan(Protocol):
    """What is needed of a span."""

    def set_attribute(self, key: str, value: Any) -> None:
        """Say something of it."""

    def set_status(self, status: Any, description: str | None = None) -> None:
        """Say how it ended."""

    def end(self) -> None:
        """Say that it is over."""


class RequestTracer:
    """Begins the span of a request, beneath the one its client names in `traceparent`."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("meshwright")
        self._kind = SpanKind.SERVER
        self._propagator = TraceContextTextMapPropagator()

    def start_span(self, headers: Mapping[str, str]) -> TraceSpan:
        """Begin a span."""
        told = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span: TraceSpan = self._tracer.start_span(
            "llm_request", context=self._propagator.extract(told), kind=self._kind
        )
        return span


def record_error(span: TraceSpan, fault: ApiError) -> None:
    """Say on a request's span what went wrong; only what the server is to blame for is an error."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", fault.summary())
    if fault.status >= 500:
        span.set_status(StatusCode.ERROR, fault.message)


def tracer_from_environment() -> RequestTracer | None:
    """Return what sends spans to the endpoint that is set; None where none is."""
    if not any(os.environ.get(name) for name in OTLP_ENDPOINT_VARIABLES):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingDependency(
            f"an OpenTelemetry endpoint is set, but {error.name} is not installed",
            "pip install 'meshwright[traces]', or unset " + " and ".join(OTLP_ENDPOINT_VARIABLES),
        ) from None
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES stand above the default.
    provider = TracerProvider(resource=Resource.create({"service.name": "meshwright"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return RequestTracer(provider)
