"""What a server and the process that prepares its requests say to each other.

A request is a `PrepareRequest` and a frame with the body as it came. Its answer is a
`PreparationFailed`, or a `PreparedHead` and as many frames as that says, each with one prompt: the
event loop reads them one by one, so that a batch of long prompts does not hold it up.
"""

from pathlib import Path
from typing import Any

import msgspec

from meshwright.run.serve.request import Request
from meshwright.run.serve.server.api_errors import ApiError
from meshwright.run.serve.server.input_processing.prepared_request import (
    InputLimits,
    Prepared,
    PreparedAnswer,
    PreparedChat,
    PreparedCompletion,
    PreparedEmbedding,
    RequestKind,
)
from meshwright.run.serve.server.server_config import ServerConfig


class StartPreparing(msgspec.Struct, frozen=True, tag="start"):
    """Read a tokenizer: the first frame."""

    model_path: str
    config: ServerConfig
    memory_bytes: int
    """What preparing may take beyond what the process has when it is ready."""
    niceness: int


class PrepareRequest(msgspec.Struct, frozen=True, tag="prepare"):
    """Prepare the body in the next frame."""

    kind: RequestKind
    limits: InputLimits


class PreparerReady(msgspec.Struct, frozen=True, tag="ready"):
    """The tokenizer is read."""


class PreparationFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The request cannot be answered."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None
    is_last: bool = False
    """Whether the process ends behind this: it has become large."""

    def to_error(self) -> ApiError:
        """Return it as it is raised."""
        return ApiError(
            self.status,
            self.message,
            param=self.param,
            code=self.code,
            retry_after_s=self.retry_after_s,
        )


class PreparedHead(msgspec.Struct, frozen=True, tag="prepared"):
    """The request is prepared."""

    prepared: Prepared
    """Without what follows."""
    parts: int
    """Frames that follow: requests, or prompts to embed, or the bytes of an answer."""
    is_last: bool = False
    """Whether the process ends behind this: it has become large."""


ToPreparer = StartPreparing | PrepareRequest
FromPreparer = PreparerReady | PreparationFailed | PreparedHead


def encode(message: ToPreparer | FromPreparer) -> bytes:
    """Return a message as the body of a frame."""
    return msgspec.msgpack.encode(message, enc_hook=_path_text)


def _path_text(value: Any) -> str:
    if isinstance(value, Path):
        return str(value)
    raise NotImplementedError(type(value))


def _path_of(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)


_to_decoder: msgspec.msgpack.Decoder[ToPreparer] = msgspec.msgpack.Decoder(
    ToPreparer, dec_hook=_path_of
)
_from_decoder: msgspec.msgpack.Decoder[FromPreparer] = msgspec.msgpack.Decoder(FromPreparer)
_request_decoder = msgspec.msgpack.Decoder(Request)
_prompt_decoder = msgspec.msgpack.Decoder(tuple[int, ...])
decode_to_preparer = _to_decoder.decode
decode_from_preparer = _from_decoder.decode


def split(prepared: Prepared) -> tuple[Prepared, list[bytes]]:
    """Return a prepared request without its long parts, and these as bodies of frames."""
    match prepared:
        case PreparedAnswer():
            return PreparedAnswer(body=b""), [prepared.body]
        case PreparedChat() | PreparedCompletion():
            parts = [msgspec.msgpack.encode(request) for request in prepared.requests]
            return msgspec.structs.replace(prepared, requests=[]), parts
    parts = [msgspec.msgpack.encode(prompt) for prompt in prepared.prompts]
    return msgspec.structs.replace(prepared, prompts=[]), parts


Part = Request | tuple[int, ...] | bytes


def decode_part(head: Prepared, part: bytes) -> Part:
    """Return one long part of a prepared request."""
    match head:
        case PreparedAnswer():
            return part
        case PreparedChat() | PreparedCompletion():
            return _request_decoder.decode(part)
    return _prompt_decoder.decode(part)


def join(head: Prepared, parts: list[Part]) -> Prepared:
    """Return a prepared request with its long parts."""
    name = {PreparedAnswer: "body", PreparedEmbedding: "prompts"}.get(type(head), "requests")
    return msgspec.structs.replace(head, **{name: parts[0] if name == "body" else parts})
