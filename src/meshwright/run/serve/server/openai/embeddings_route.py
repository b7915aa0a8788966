"""`/v1/embeddings`: a vector for each text."""

import base64
import struct
from collections.abc import Sequence

from meshwright.errors import InputError, MeshwrightError
from meshwright.run.serve.server.admission import RequestContext
from meshwright.run.serve.server.api_errors import ApiError, invalid_request, unservable_request
from meshwright.run.serve.server.app_state import AppState, ResponseBody
from meshwright.run.serve.server.protocol.request_conversion import (
    encode_prompts,
    resolve_lora,
    resolve_model,
)
from meshwright.run.serve.server.protocol.request_schema import EmbeddingRequest
from meshwright.run.serve.server.protocol.response_schema import (
    EmbeddingData,
    EmbeddingResponse,
    EmbeddingUsageInfo,
)
from meshwright.run.serve.server.sse import encode


async def create_embedding(
    app_state: AppState, body: EmbeddingRequest, context: RequestContext
) -> ResponseBody:
    """Answer a request for vectors."""
    settings = app_state.config
    model = resolve_model(body.model, settings)
    if body.dimensions is not None:
        raise invalid_request("`dimensions` is not supported: vectors come whole", "dimensions")
    prompts = await encode_prompts(
        body.input, app_state.tokenizer, param="input", most=settings.max_prompts_per_request
    )
    most = min(
        app_state.engine.max_embed_len, settings.max_prompt_tokens or app_state.engine.max_embed_len
    )
    for at, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= most:
            raise invalid_request(
                f"`input` {at} has {len(prompt)} tokens; 1 to {most} are taken here",
                "input",
                "context_length_exceeded" if prompt else None,
            )
    app_state.require_ready()
    app_state.admission.check_capacity()
    context.prompt_tokens = total = sum(map(len, prompts))
    app_state.admission.record_queued()
    try:
        vectors = await app_state.engine.embed(prompts, adapter=resolve_lora(model, settings))
    except InputError as error:
        raise unservable_request(error, "input") from None
    except MeshwrightError as error:
        raise ApiError(503, str(error), code="engine_error", retry_after_s=10) from None
    finally:
        app_state.admission.record_early_end()
    packed = body.encoding_format == "base64"
    data = [
        EmbeddingData(index=at, embedding=encode_base64(vector) if packed else vector)
        for at, vector in enumerate(vectors)
    ]
    return encode(EmbeddingResponse(model=model, data=data, usage=EmbeddingUsageInfo(total, total)))


def encode_base64(vector: Sequence[float]) -> str:
    """Return numbers as little-endian floats in base64."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
