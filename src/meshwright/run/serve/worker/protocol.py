"""What a server and the process of an engine say to each other: MessagePack values in frames.

Nothing that is read is ever run.
"""

import msgspec

from meshwright.run.serve import frame_codec
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.engine_client import MEMORY_TAGS, MemoryTag
from meshwright.run.serve.engine_stats import EngineStats
from meshwright.run.serve.request import Request, RequestOutput
from meshwright.spec.model import Model


class StartEngine(msgspec.Struct, frozen=True, tag="start"):
    """Load a model: the first frame."""

    source: str | Model
    """Where it lies; weights of a `Model` are drawn."""
    config: EngineConfig
    threads: int | None = None
    """Of torch on a processor; None leaves it as it is."""
    final_only: bool = False
    """Send an answer when it has ended, in one piece."""
    kv_transfer_folder: str = ""
    """The folder of its parcels in shared memory, which whoever starts it takes away."""


class AddRequest(msgspec.Struct, frozen=True, tag="request"):
    """Answer."""

    request_id: int
    request: Request


class AddRequests(msgspec.Struct, frozen=True, tag="several"):
    """Answer all of these, and begin with none before all are there."""

    requests: list[AddRequest]


class AbortRequest(msgspec.Struct, frozen=True, tag="cancel"):
    """Nobody waits for an answer any more, or for vectors."""

    request_id: int


class UtilityCall(msgspec.Struct, frozen=True, tag="call"):
    """Do something else than answer."""

    call_id: int
    method: str
    prompts: list[tuple[int, ...]] = []
    lora_name: str | None = None
    """The LoRA adapter that prompts are embedded with."""
    path: str = ""
    level: int = 1
    memory_tags: tuple[MemoryTag, ...] = MEMORY_TAGS
    """What wakes."""
    version: int = 0
    payload: bytes = b""
    """A message that only who performs this call can read."""


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes asks."""

    max_model_len: int
    max_embed_len: int
    kv_cache_tokens: int
    """Tokens whose keys and values fit."""
    startup_s: list[tuple[str, float]]
    supports_kv_transfer: bool = True
    """Whether keys and values can go to another engine, or come from one."""
    stats: EngineStats = EngineStats()
    """What it tells of itself before anybody has asked."""


class RequestRejected(msgspec.Struct, frozen=True, tag="refused"):
    """An ask or a call that cannot be done, or the start itself (number 0)."""

    request_id: int
    problems: list[tuple[str, str, str]]
    """Where, what, and a fix."""
    kv_transfer_error: str = ""
    """Why the KV transfer for a request failed, where that is it."""
    engine_error: str = ""
    """What went wrong with it in the engine, where it is not to blame itself."""


class EngineOutputs(msgspec.Struct, frozen=True, tag="answered"):
    """Pieces of answers."""

    outputs: list[tuple[int, RequestOutput]]


class UtilityResult(msgspec.Struct, frozen=True, tag="done"):
    """A call is done."""

    call_id: int
    embeddings: list[list[float]] = []
    payload: bytes = b""


class EngineHeartbeat(msgspec.Struct, frozen=True, tag="beat"):
    """What the engine does at this moment."""

    stats: EngineStats


WorkerMessage = StartEngine | AddRequest | AddRequests | AbortRequest | UtilityCall
EngineMessage = EngineReady | RequestRejected | EngineOutputs | UtilityResult | EngineHeartbeat
worker_message_decoder = msgspec.msgpack.Decoder(WorkerMessage)
engine_message_decoder = msgspec.msgpack.Decoder(EngineMessage)
_encoder = msgspec.msgpack.Encoder()


def encode_message(message: WorkerMessage | EngineMessage) -> bytes:
    """Return a message as a frame."""
    return frame_codec.encode_frame(_encoder.encode(message))
