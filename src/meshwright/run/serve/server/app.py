"""`create_app`: the server as an ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from meshwright.http_pages.allowed_hosts import make_allowed_hosts
from meshwright.run.serve.engine_client import EngineClient, SleepableEngine
from meshwright.run.serve.server.access_log import AccessLogMiddleware
from meshwright.run.serve.server.api_errors import ApiError
from meshwright.run.serve.server.app_state import AppState
from meshwright.run.serve.server.endpoint import Endpoint, authenticate, json_reader
from meshwright.run.serve.server.host_check import HostCheckMiddleware
from meshwright.run.serve.server.input_processing.inline_processor import InlineInputProcessor
from meshwright.run.serve.server.input_processing.prepared_request import (
    InputProcessor,
    RequestKind,
)
from meshwright.run.serve.server.lifecycle_routes import (
    sleep_route,
    update_weights_route,
    wake_up_route,
)
from meshwright.run.serve.server.openai.chat_completions import create_chat_completion
from meshwright.run.serve.server.openai.completions import create_completion
from meshwright.run.serve.server.openai.embeddings_route import create_embedding
from meshwright.run.serve.server.openapi import RouteSpec, build_openapi_document
from meshwright.run.serve.server.protocol import request_schema, response_schema
from meshwright.run.serve.server.server_config import ServerConfig
from meshwright.run.serve.server.sse import encode
from meshwright.run.serve.server.tokenize_routes import prepared_answer_route
from meshwright.run.serve.server.tracing import RequestTracer, tracer_from_environment
from meshwright.run.serve.tokenizer.tokenizer_like import TokenizerLike

ERROR_STATUSES = (400, 401, 408, 413, 415, 429, 503, 504)
POST_ROUTES: list[tuple[str, Any, Any, type, str, RequestKind]] = [
    (
        "/v1/completions",
        request_schema.CompletionRequest,
        create_completion,
        response_schema.CompletionResponse,
        "Continue prompts",
        "completion",
    ),
    (
        "/v1/chat/completions",
        request_schema.ChatCompletionRequest,
        create_chat_completion,
        response_schema.ChatCompletionResponse,
        "Answer messages",
        "chat",
    ),
    (
        "/v1/embeddings",
        request_schema.EmbeddingRequest,
        create_embedding,
        response_schema.EmbeddingResponse,
        "Make vectors of texts",
        "embedding",
    ),
    (
        "/tokenize",
        request_schema.TokenizeRequest,
        prepared_answer_route,
        response_schema.TokenizeResponse,
        "Tokens of a text",
        "tokenize",
    ),
    (
        "/detokenize",
        request_schema.DetokenizeRequest,
        prepared_answer_route,
        response_schema.DetokenizeResponse,
        "Text of tokens",
        "detokenize",
    ),
]
"""Path, body, handler, its answer, what it does, and how it is prepared."""
ADMIN_POST_ROUTES: list[tuple[str, Any, Any, type, str]] = [
    (
        "/sleep",
        request_schema.SleepRequest,
        sleep_route,
        response_schema.SleepResponse,
        "Free the engine's memory",
    ),
    (
        "/wake_up",
        request_schema.WakeUpRequest,
        wake_up_route,
        response_schema.SleepResponse,
        "Take the memory again",
    ),
    (
        "/update_weights",
        request_schema.UpdateWeightsRequest,
        update_weights_route,
        response_schema.UpdateWeightsResponse,
        "Change weights",
    ),
]


def create_app(
    engine: EngineClient,
    tokenizer: TokenizerLike,
    settings: ServerConfig,
    *,
    spans: RequestTracer | None = None,
    input_processor: InputProcessor | None = None,
) -> Starlette:
    """Return the server of an engine.

    Args:
        engine: What answers; the server closes it when it ends.
        tokenizer: The model's tokenizer.
        settings: Names and limits.
        input_processor: What decodes, renders and tokenises requests; left out, this process does,
            without bounds on the time and memory of chat templates.
        spans: Where traces go; left out, the environment's OpenTelemetry endpoint, if one is set.

    Raises:
        InputError: Where a file of keys cannot be read.
        MissingDependency: Where an endpoint for traces is set and OpenTelemetry is not installed.
    """
    input_processor = input_processor or InlineInputProcessor(tokenizer, settings)
    desk = AppState(
        engine, tokenizer, settings, spans or tracer_from_environment(), input_processor
    )
    views = InfoRoutes(desk)
    routes = [*views.routes()]
    told = [*views.documented_routes()]
    for path, body, handle, reply, summary, kind in POST_ROUTES:
        read = partial(desk.prepare, kind)
        routes.append(Route(path, Endpoint(desk, read, handle), methods=["POST"]))
        told.append(
            RouteSpec("post", path, summary, reply, True, (*ERROR_STATUSES, 404, 501), body)
        )
    for path, body, handle, reply, summary in ADMIN_POST_ROUTES:
        read_admin = json_reader(body)
        routes.append(Route(path, Endpoint(desk, read_admin, handle, "admin"), methods=["POST"]))
        lacks = not any(field.required for field in msgspec.structs.fields(body))
        told.append(
            RouteSpec("post", path, summary, reply, True, (*ERROR_STATUSES, 403, 501), body, lacks)
        )
    views.openapi_json = encode(build_openapi_document(told, get_package_version()))
    paths = frozenset(route.path for route in routes)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await input_processor.close()
            await engine.close()

    hosts = make_allowed_hosts(settings.allowed_hosts, settings.host)
    middleware = [
        Middleware(AccessLogMiddleware, metrics=desk.metrics, paths=paths, log=settings.access_log),
        Middleware(HostCheckMiddleware, hosts=hosts),
    ]
    if settings.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.allowed_origins),
                allow_methods=["GET", "POST"],
                # Clients for browsers send headers of their own: OpenAI's has a dozen.
                allow_headers=["*"],
                expose_headers=["retry-after", "x-request-id"],
            )
        )
    app = Starlette(
        routes=routes,
        middleware=middleware,
        lifespan=lifespan,
        exception_handlers={HTTPException: _strange, ApiError: _fault},
    )
    # A redirect would name this server as it sees itself, which behind a proxy with certificates is
    # an address without: a client that follows it shows its key to everybody on the way.
    app.router.redirect_slashes = False
    app.state.desk = desk
    return app


def get_package_version() -> str:
    """Return the version of this package."""
    try:
        return version("meshwright")
    except PackageNotFoundError:
        return "unknown"


class InfoRoutes:
    """The endpoints that are only read."""

    def __init__(self, app_state: AppState) -> None:
        self._desk = app_state
        self.openapi_json = b""

    def routes(self) -> list[Route]:
        """Return where they stand."""
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/health", self.health),
            Route("/ping", self.health),
            Route("/version", self.version),
            Route("/metrics", self.metrics),
            Route("/is_sleeping", self.is_sleeping),
            Route("/openapi.json", self.openapi),
        ]

    def documented_routes(self) -> list[RouteSpec]:
        """Return what the OpenAPI page says of them."""
        return [
            RouteSpec(
                "get",
                "/v1/models",
                "Models to ask",
                response_schema.ModelList,
                error_statuses=(401,),
            ),
            RouteSpec(
                "get",
                "/health",
                "Whether all is well",
                response_schema.HealthResponse,
                False,
                (503,),
            ),
            RouteSpec("get", "/ping", "As /health", response_schema.HealthResponse, False, (503,)),
            RouteSpec("get", "/version", "The version", response_schema.VersionResponse, False),
            RouteSpec("get", "/metrics", "Figures for Prometheus", None, False),
            RouteSpec(
                "get",
                "/is_sleeping",
                "Whether it sleeps",
                response_schema.SleepResponse,
                False,
                (501,),
            ),
        ]

    async def models(self, request: Request) -> Response:
        """Answer with every model."""
        authenticate(self._desk, request.headers, "key")
        return _json(response_schema.ModelList(data=self._cards()))

    async def model(self, request: Request) -> Response:
        """Answer with one model."""
        authenticate(self._desk, request.headers, "key")
        name = request.path_params["name"]
        for card in self._cards():
            if card.id == name:
                return _json(card)
        raise ApiError(404, f"The model `{name}` is not served here", code="model_not_found")

    def _cards(self) -> list[response_schema.ModelCard]:
        desk = self._desk
        root = desk.config.model
        return [
            response_schema.ModelCard(
                id=name,
                created=desk.started_s,
                root=name if name in desk.config.lora_names else root,
                parent=root if name in desk.config.lora_names else None,
                max_model_len=desk.engine.max_model_len,
            )
            for name in desk.config.served_model_names()
        ]

    async def health(self, _: Request) -> Response:
        """Answer whether requests are taken and the engine makes progress."""
        desk = self._desk
        if desk.admission.is_draining:
            return _json(response_schema.HealthResponse("draining", "server is shutting down"), 503)
        if reason := desk.engine.health_problem():
            return _json(response_schema.HealthResponse("unhealthy", reason), 503)
        if isinstance(desk.engine, SleepableEngine) and desk.engine.is_sleeping():
            # It is well, and who put it to sleep would not want it started anew.
            return _json(response_schema.HealthResponse("sleeping", "POST /wake_up wakes it"))
        return _json(response_schema.HealthResponse("ok"))

    async def version(self, _: Request) -> Response:
        """Answer with the version."""
        return _json(response_schema.VersionResponse(get_package_version()))

    async def metrics(self, _: Request) -> Response:
        """Answer with the figures."""
        page, kind = self._desk.metrics.render()
        return Response(page, headers={"content-type": kind})

    async def is_sleeping(self, _: Request) -> Response:
        """Answer whether the engine sleeps."""
        engine = self._desk.engine
        if not isinstance(engine, SleepableEngine):
            raise ApiError(501, "This engine cannot sleep", code="unsupported")
        return _json(response_schema.SleepResponse(engine.is_sleeping()))

    async def openapi(self, _: Request) -> Response:
        """Answer with the description of all endpoints."""
        return Response(self.openapi_json, media_type="application/json")


def _json(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


def _fault(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


def _strange(request: Request, error: Exception) -> Response:
    """Answer a request for something that is not there."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    message = {404: f"There is no {asked}", 405: f"{asked}: not with this method"}.get(
        error.status_code, error.detail
    )
    return ApiError(error.status_code, message).response(error.headers)
