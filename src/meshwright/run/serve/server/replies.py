"""The bodies of answers that are no streams."""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "tool_calls"]


class PromptDetails(msgspec.Struct, frozen=True):
    """What is known of the tokens of the prompts."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = PromptDetails()


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """How likely the tokens of a completion were."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class LikelyToken(msgspec.Struct, frozen=True):
    """A token, and how likely it was."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """A token of an answer, how likely it was, and which others were."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[LikelyToken]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """How likely the tokens of an answer were."""

    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """A function that the model calls, with its arguments as JSON in a string."""

    name: str
    arguments: str


class CalledTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CalledTool] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a chat."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of one input: numbers, or their little-endian floats in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct, frozen=True):
    """Counts of tokens of an embedding request."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/embeddings`."""

    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """A model that can be asked."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "meshwright"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/models`."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """The answer of `/detokenize`."""

    prompt: str


class Health(msgspec.Struct, frozen=True):
    """The answer of `/health`."""

    status: Literal["ok", "asleep", "draining", "ill"]
    reason: str = ""


class Version(msgspec.Struct, frozen=True):
    """The answer of `/version`."""

    version: str


class Sleeping(msgspec.Struct, frozen=True):
    """The answer of `/is_sleeping` and of whatever changes it."""

    is_sleeping: bool


class Updated(msgspec.Struct, frozen=True):
    """The answer of `/update_weights`."""

    updated: str
