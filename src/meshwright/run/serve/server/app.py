"""`serve_app`: the server as an ASGI application."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
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

from meshwright.run.serve.interface import Serves, Sleeps
from meshwright.run.serve.server import bodies, replies
from meshwright.run.serve.server.chat import chat
from meshwright.run.serve.server.completions import complete
from meshwright.run.serve.server.desk import Desk
from meshwright.run.serve.server.door import Door
from meshwright.run.serve.server.embeddings import embed
from meshwright.run.serve.server.endpoint import Endpoint, admitted
from meshwright.run.serve.server.faults import Fault
from meshwright.run.serve.server.openapi import Told, document
from meshwright.run.serve.server.plain import detokenize, sleep, tokenize, update_weights, wake_up
from meshwright.run.serve.server.settings import ServerSettings
from meshwright.run.serve.server.spans import Spans, spans_from_environment
from meshwright.run.serve.server.streams import encode
from meshwright.run.serve.server.words import Words

REFUSALS = (400, 401, 408, 413, 415, 429, 503, 504)
# path, body, handler, its answer, who may, what it does
POSTS: list[tuple[str, Any, Any, type, str]] = [
    ("/v1/completions", bodies.CompletionBody, complete, replies.Completion, "Continue prompts"),
    ("/v1/chat/completions", bodies.ChatBody, chat, replies.ChatCompletion, "Answer messages"),
    ("/v1/embeddings", bodies.EmbeddingBody, embed, replies.Embeddings, "Make vectors of texts"),
    ("/tokenize", bodies.TokenizeBody, tokenize, replies.Tokens, "Tokens of a text"),
    ("/detokenize", bodies.DetokenizeBody, detokenize, replies.Detokenized, "Text of tokens"),
]
ADMIN_POSTS: list[tuple[str, Any, Any, type, str]] = [
    ("/sleep", bodies.SleepBody, sleep, replies.Sleeping, "Free the engine's memory"),
    ("/wake_up", bodies.WakeBody, wake_up, replies.Sleeping, "Take the memory again"),
    ("/update_weights", bodies.WeightsBody, update_weights, replies.Updated, "Change weights"),
]


def serve_app(
    engine: Serves, words: Words, settings: ServerSettings, *, spans: Spans | None = None
) -> Starlette:
    """Return the server of an engine.

    Args:
        engine: What answers; the server closes it when it ends.
        words: The model's tokenizer.
        settings: Names and limits.
        spans: Where traces go; left out, the environment's OpenTelemetry endpoint, if one is set.

    Raises:
        InputError: Where a file of keys cannot be read.
        MissingPart: Where an endpoint for traces is set and OpenTelemetry is not installed.
    """
    desk = Desk(engine, words, settings, spans or spans_from_environment())
    views = Views(desk)
    routes = [*views.routes()]
    told = [*views.told()]
    for path, body, handle, reply, summary in POSTS:
        routes.append(Route(path, Endpoint(desk, body, handle), methods=["POST"]))
        told.append(Told("post", path, summary, reply, True, (*REFUSALS, 404, 501), body))
    for path, body, handle, reply, summary in ADMIN_POSTS:
        routes.append(Route(path, Endpoint(desk, body, handle, "admin"), methods=["POST"]))
        lacks = not any(field.required for field in msgspec.structs.fields(body))
        told.append(Told("post", path, summary, reply, True, (*REFUSALS, 403, 501), body, lacks))
    views.page = encode(document(told, package_version()))
    paths = frozenset(route.path for route in routes)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await engine.close()

    middleware = [Middleware(Door, figures=desk.figures, paths=paths, log=settings.access_log)]
    if settings.origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.origins),
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
        exception_handlers={HTTPException: _strange, Fault: _fault},
    )
    # A redirect would name this server as it sees itself, which behind a proxy with certificates is
    # an address without: a client that follows it shows its key to everybody on the way.
    app.router.redirect_slashes = False
    app.state.desk = desk
    return app


def package_version() -> str:
    """Return the version of this package."""
    try:
        return version("meshwright")
    except PackageNotFoundError:
        return "unknown"


class Views:
    """The endpoints that are only read."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self.page = b""

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

    def told(self) -> list[Told]:
        """Return what the OpenAPI page says of them."""
        return [
            Told("get", "/v1/models", "Models to ask", replies.ModelList, statuses=(401,)),
            Told("get", "/health", "Whether all is well", replies.Health, False, (503,)),
            Told("get", "/ping", "As /health", replies.Health, False, (503,)),
            Told("get", "/version", "The version", replies.Version, False),
            Told("get", "/metrics", "Figures for Prometheus", None, False),
            Told("get", "/is_sleeping", "Whether it sleeps", replies.Sleeping, False, (501,)),
        ]

    async def models(self, request: Request) -> Response:
        """Answer with every model."""
        admitted(self._desk, request.headers, "key")
        return _json(replies.ModelList(data=self._cards()))

    async def model(self, request: Request) -> Response:
        """Answer with one model."""
        admitted(self._desk, request.headers, "key")
        name = request.path_params["name"]
        for card in self._cards():
            if card.id == name:
                return _json(card)
        raise Fault(404, f"The model `{name}` is not served here", code="model_not_found")

    def _cards(self) -> list[replies.ModelCard]:
        desk = self._desk
        root = desk.settings.model
        return [
            replies.ModelCard(
                id=name,
                created=desk.begun,
                root=name if name in desk.settings.adapters else root,
                parent=root if name in desk.settings.adapters else None,
                max_model_len=desk.engine.max_length,
            )
            for name in desk.settings.names()
        ]

    async def health(self, _: Request) -> Response:
        """Answer whether requests are taken and the engine makes progress."""
        desk = self._desk
        if desk.traffic.draining:
            return _json(replies.Health("draining", "the server is going down"), 503)
        if reason := desk.engine.ill():
            return _json(replies.Health("ill", reason), 503)
        if isinstance(desk.engine, Sleeps) and desk.engine.asleep():
            # It is well, and who put it to sleep would not want it started anew.
            return _json(replies.Health("asleep", "POST /wake_up wakes it"))
        return _json(replies.Health("ok"))

    async def version(self, _: Request) -> Response:
        """Answer with the version."""
        return _json(replies.Version(package_version()))

    async def metrics(self, _: Request) -> Response:
        """Answer with the figures."""
        page, kind = self._desk.figures.exposition()
        return Response(page, headers={"content-type": kind})

    async def is_sleeping(self, _: Request) -> Response:
        """Answer whether the engine sleeps."""
        engine = self._desk.engine
        if not isinstance(engine, Sleeps):
            raise Fault(501, "This engine cannot sleep", code="not_offered")
        return _json(replies.Sleeping(engine.asleep()))

    async def openapi(self, _: Request) -> Response:
        """Answer with the description of all endpoints."""
        return Response(self.page, media_type="application/json")


def _json(value: msgspec.Struct, status: int = 200) -> Response:
    return Response(encode(value), status, media_type="application/json")


def _fault(_: Request, error: Exception) -> Response:
    assert isinstance(error, Fault)
    return error.response()


def _strange(request: Request, error: Exception) -> Response:
    """Answer a request for something that is not there."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    message = {404: f"There is no {asked}", 405: f"{asked}: not with this method"}.get(
        error.status_code, error.detail
    )
    return Fault(error.status_code, message).response(error.headers)
