"""`/v1/embeddings`: a vector for each text."""

import base64
import struct
from collections.abc import Sequence

from meshwright.errors import InputError, MeshwrightError
from meshwright.run.serve.server.asking import adapter_of, named_model, prompts_of
from meshwright.run.serve.server.bodies import EmbeddingBody
from meshwright.run.serve.server.desk import Answer, Desk
from meshwright.run.serve.server.faults import Fault, impossible, refused
from meshwright.run.serve.server.replies import Embedding, Embeddings, EmbeddingUsage
from meshwright.run.serve.server.streams import encode
from meshwright.run.serve.server.traffic import Call


async def embed(desk: Desk, body: EmbeddingBody, call: Call) -> Answer:
    """Answer a request for vectors."""
    settings = desk.settings
    model = named_model(body.model, settings)
    if body.dimensions is not None:
        raise refused("`dimensions` is not offered: vectors come whole", "dimensions")
    prompts = await prompts_of(body.input, desk.words, param="input", most=settings.prompts)
    most = min(desk.engine.embed_length, settings.prompt_tokens or desk.engine.embed_length)
    for at, prompt in enumerate(prompts):
        if not 0 < len(prompt) <= most:
            raise refused(
                f"`input` {at} has {len(prompt)} tokens; 1 to {most} are taken here",
                "input",
                "context_length_exceeded" if prompt else None,
            )
    desk.check_awake()
    desk.traffic.check()
    call.prompt_tokens = total = sum(map(len, prompts))
    desk.traffic.asked()
    try:
        vectors = await desk.engine.embed(prompts, adapter=adapter_of(model, settings))
    except InputError as error:
        raise impossible(error, "input") from None
    except MeshwrightError as error:
        raise Fault(503, str(error), code="engine_error", retry_s=10) from None
    finally:
        desk.traffic.abandoned()
    packed = body.encoding_format == "base64"
    data = [
        Embedding(index=at, embedding=in_base64(vector) if packed else vector)
        for at, vector in enumerate(vectors)
    ]
    return encode(Embeddings(model=model, data=data, usage=EmbeddingUsage(total, total)))


def in_base64(vector: Sequence[float]) -> str:
    """Return numbers as little-endian floats in base64."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
