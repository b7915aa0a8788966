"""The bodies of answers that are no streams."""

from typing import Literal

import msgspec

OpenAIFinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """What is known of the tokens of the prompts."""

    cached_tokens: int = 0


class UsageInfo(msgspec.Struct, frozen=True):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """How likely the tokens of a completion were."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionResponseChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to one prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: OpenAIFinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/completions`."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseChoice]
    usage: UsageInfo | None = None


class TopLogprob(msgspec.Struct, frozen=True):
    """A token, and how likely it was."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """A token of an answer, how likely it was, and which others were."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatChoiceLogprobs(msgspec.Struct, frozen=True):
    """How likely the tokens of an answer were."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class ResponseFunctionCall(msgspec.Struct, frozen=True):
    """A function that the model calls, with its arguments as JSON in a string."""

    name: str
    arguments: str


class ResponseToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: ResponseFunctionCall


class ChatResponseMessage(msgspec.Struct, frozen=True, kw_only=True):
    """What the model says."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ResponseToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatResponseChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer to a chat."""

    index: int
    message: ChatResponseMessage
    logprobs: ChatChoiceLogprobs | None = None
    finish_reason: OpenAIFinishReason | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletionResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatResponseChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class EmbeddingData(msgspec.Struct, frozen=True, kw_only=True):
    """The vector of one input: numbers, or their little-endian floats in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingUsageInfo(msgspec.Struct, frozen=True):
    """Counts of tokens of an embedding request."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/v1/embeddings`."""

    object: Literal["list"] = "list"
    model: str
    data: list[EmbeddingData]
    usage: EmbeddingUsageInfo


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


class TokenizeResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """The answer of `/detokenize`."""

    prompt: str


class HealthResponse(msgspec.Struct, frozen=True):
    """The answer of `/health`."""

    status: Literal["ok", "sleeping", "draining", "unhealthy"]
    reason: str = ""


class VersionResponse(msgspec.Struct, frozen=True):
    """The answer of `/version`."""

    version: str


class SleepResponse(msgspec.Struct, frozen=True):
    """The answer of `/is_sleeping` and of whatever changes it."""

    is_sleeping: bool


class UpdateWeightsResponse(msgspec.Struct, frozen=True):
    """The answer of `/update_weights`."""

    updated: str
