"""`/v1/embeddings`: a vector for each text."""

import asyncio
import base64
import struct
from collections.abc import Sequence

from meshwright.errors import InputError, MeshwrightError
from meshwright.run.serve.server.admission import RequestContext
from meshwright.run.serve.server.api_errors import ApiError, unservable_request
from meshwright.run.serve.server.app_state import AppState, ResponseBody
from meshwright.run.serve.server.input_processing.prepared_request import PreparedEmbedding
from meshwright.run.serve.server.protocol.response_schema import (
    EmbeddingData,
    EmbeddingResponse,
    EmbeddingUsageInfo,
)
from meshwright.run.serve.server.sse import encode


async def create_embedding(
    app_state: AppState, prepared: PreparedEmbedding, context: RequestContext
) -> ResponseBody:
    """Answer a request for vectors."""
    app_state.require_ready()
    app_state.admission.check_capacity()
    context.prompt_tokens = total = sum(map(len, prepared.prompts))
    app_state.admission.record_queued()
    try:
        vectors = await app_state.engine.embed(prepared.prompts, adapter=prepared.lora_name)
    except InputError as error:
        raise unservable_request(error, "input") from None
    except MeshwrightError as error:
        raise ApiError(503, str(error), code="engine_error", retry_after_s=10) from None
    finally:
        app_state.admission.record_early_end()
    data = []
    for at, vector in enumerate(vectors):
        packed = encode_base64(vector) if prepared.base64 else list(vector)
        data.append(EmbeddingData(index=at, embedding=packed))
        await asyncio.sleep(0)
    return encode(
        EmbeddingResponse(model=prepared.model, data=data, usage=EmbeddingUsageInfo(total, total))
    )


def encode_base64(vector: Sequence[float]) -> str:
    """Return numbers as little-endian floats in base64."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
