"""What is left of a request's body once it is decoded, checked and tokenised: its bounded part."""

from typing import Literal, Protocol

import msgspec

from meshwright.run.serve.request import Request
from meshwright.run.serve.server.protocol.tool_choice import ToolChoice
from meshwright.run.serve.server.sse import UsageReporting

RequestKind = Literal["chat", "completion", "embedding", "tokenize", "detokenize"]


class InputLimits(msgspec.Struct, frozen=True):
    """What the engine has room for at the moment."""

    max_model_len: int
    max_embed_len: int


class PreparedChat(msgspec.Struct, frozen=True, kw_only=True, tag="chat"):
    """A chat."""

    model: str
    lora_name: str | None
    requests: list[Request]
    """One; its tenant is the body's user."""
    field_names: dict[str, str]
    tools: ToolChoice
    """Without what only the template and the grammar need."""
    constrained: bool
    """Whether a grammar that is not a demanded call binds the answer."""
    stream: bool
    usage: UsageReporting
    logprobs: bool
    return_token_ids: bool


class PreparedCompletion(msgspec.Struct, frozen=True, kw_only=True, tag="completion"):
    """Prompts to continue."""

    model: str
    lora_name: str | None
    requests: list[Request]
    field_names: dict[str, str]
    texts: list[str | None]
    """The prompts as they were written, where they are echoed; None for one given as tokens."""
    echo: bool
    hide_output: bool
    """Whether only the echo is asked for."""
    stream: bool
    usage: UsageReporting
    logprobs: int | None
    return_token_ids: bool


class PreparedEmbedding(msgspec.Struct, frozen=True, kw_only=True, tag="embedding"):
    """Prompts to embed."""

    model: str
    lora_name: str | None
    prompts: list[tuple[int, ...]]
    base64: bool


class PreparedAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """A request that needs no engine: the body of its answer."""

    body: bytes


Prepared = PreparedChat | PreparedCompletion | PreparedEmbedding | PreparedAnswer


class InputProcessor(Protocol):
    """Prepares requests."""

    async def process(self, kind: RequestKind, body: bytes, limits: InputLimits) -> Prepared:
        """Return what a body asks for; raises `ApiError` where it cannot be answered."""

    async def close(self) -> None:
        """Let go of processes."""
