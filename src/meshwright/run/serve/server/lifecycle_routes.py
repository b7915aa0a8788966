"""HTTP routes that put the engine to sleep, wake it up and update its weights."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from meshwright.errors import InputError, MeshwrightError
from meshwright.run.serve.engine_client import (
    MEMORY_TAGS,
    MemoryTag,
    SleepableEngine,
    WeightUpdatableEngine,
)
from meshwright.run.serve.server.admission import RequestContext
from meshwright.run.serve.server.api_errors import ApiError, unservable_request
from meshwright.run.serve.server.app_state import AppState, ResponseBody
from meshwright.run.serve.server.protocol.request_schema import (
    SleepRequest,
    UpdateWeightsRequest,
    WakeUpRequest,
)
from meshwright.run.serve.server.protocol.response_schema import (
    SleepResponse,
    UpdateWeightsResponse,
)
from meshwright.run.serve.server.sse import encode

_TAGGED: dict[str, MemoryTag] = {"weights": "weights", "kv_cache": "cache"}
"""What vLLM's tags name."""


async def sleep_route(app_state: AppState, body: SleepRequest, _: RequestContext) -> ResponseBody:
    """Put the engine to sleep."""
    engine = _sleeper(app_state)
    await _done(app_state, engine.sleep(body.level))
    return encode(SleepResponse(engine.is_sleeping()))


async def wake_up_route(
    app_state: AppState, body: WakeUpRequest, _: RequestContext
) -> ResponseBody:
    """Wake the engine, or some of its memory."""
    engine = _sleeper(app_state)
    parts = MEMORY_TAGS if body.tags is None else tuple(_TAGGED[tag] for tag in body.tags)
    await _done(app_state, engine.wake_up(parts))
    return encode(SleepResponse(engine.is_sleeping()))


async def update_weights_route(
    app_state: AppState, body: UpdateWeightsRequest, _: RequestContext
) -> ResponseBody:
    """Replace the engine's weights."""
    if not isinstance(app_state.engine, WeightUpdatableEngine):
        raise ApiError(501, "This engine cannot change its weights", code="unsupported")
    await _done(app_state, app_state.engine.update_weights(body.path), "path")
    return encode(UpdateWeightsResponse(body.path))


async def _done(
    app_state: AppState, change: Coroutine[Any, Any, None], param: str | None = None
) -> None:
    """Wait for a change, which goes on to its end even if whoever asked for it goes away."""
    try:
        await asyncio.shield(asyncio.ensure_future(change))
    except InputError as error:
        raise unservable_request(error, param) from None
    except MeshwrightError as error:
        # It may be as it was before, and well.
        raise ApiError(
            503,
            str(error),
            code="engine_unhealthy" if app_state.engine.health_problem() else "failed",
        ) from None


def _sleeper(app_state: AppState) -> SleepableEngine:
    if not isinstance(app_state.engine, SleepableEngine):
        raise ApiError(501, "This engine cannot sleep", code="unsupported")
    return app_state.engine
