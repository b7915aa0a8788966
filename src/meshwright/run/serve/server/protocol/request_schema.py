"""The bodies of requests, field by field: types and limits that are the same for every model.

A field that is not listed here is refused by name, so that nothing a client asks for is dropped
in silence; where it is null, nobody asked for anything (`drop_unknown_nulls`). Those under "taken
and not used" say nothing that changes an answer.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
PositiveInt = Annotated[int, Meta(ge=1, le=2**31 - 1)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
JsonObject = dict[str, Any]
MAX_LISTED_TOKENS = 1024
"""Tokens that `logit_bias` and `stop_token_ids` may name; OpenAI takes 300 at most."""
LogitBias = Annotated[
    dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_LISTED_TOKENS)
]
"""By the number of a token, as text. A dict keyed by numbers that a client chooses would be filled
in quadratic time: Python's hash of a number is known, that of a text is random."""


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stream tells beside its pieces."""

    include_usage: bool = False
    """A last piece with the counts of tokens."""
    continuous_usage_stats: bool = False
    """The counts with every piece."""
    include_obfuscation: bool = False


class StructuredOutputsField(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an answer must look like: one of these."""

    json: JsonObject | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What completions and chats share: how tokens are drawn and when an answer ends."""

    model: Annotated[str, Meta(max_length=512)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-3, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_LISTED_TOKENS)] | None = None
    ignore_eos: bool | None = None
    min_tokens: NonNegativeInt | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    user: Annotated[str, Meta(max_length=512)] | None = None
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: JsonObject | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    # Taken and not used.
    metadata: JsonObject | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """A JSON schema with its name."""

    name: str = ""
    schema: JsonObject | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether an answer is text, any JSON, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/completions`."""

    prompt: str | list[str | TokenId | list[TokenId]]
    """A text, several texts, the tokens of a prompt, or those of several."""
    max_tokens: NonNegativeInt | None = None
    """None makes 16, as the API has it."""
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=128)] | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A call of a function: its arguments are JSON in a string."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool call of an earlier answer."""

    function: FunctionCall
    id: str = ""
    type: Literal["function"] = "function"
    # Taken and not used.
    index: int | None = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a message; only text is taken, and the others are known to be refused as such."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: Any = None
    input_audio: Any = None
    audio_url: Any = None
    video_url: Any = None
    file: Any = None
    # Taken and not used.
    cache_control: JsonObject | None = None


class ChatMessageParam(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message of a chat."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    """What an earlier answer said in place of content."""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name for it."""
    # Clients send earlier answers back with all of their fields. Taken and not used.
    annotations: list[Any] | None = None
    audio: JsonObject | None = None
    function_call: None = None
    """OpenAI's old way to call; where there is one, `tool_calls` has to tell it."""


class FunctionDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ToolParam(msgspec.Struct, frozen=True, kw_only=True):
    """A tool that the model may use."""

    function: FunctionDefinition
    type: Literal["function"] = "function"


class NamedFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The name of the function that must be called."""

    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The tool that must be used."""

    function: NamedFunction
    type: Literal["function"] = "function"


class ChatCompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessageParam], Meta(min_length=1)]
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[ToolParam] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: JsonObject | None = None
    """Further values for the model's chat template, such as `enable_thinking`."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    modalities: list[Literal["text"]] | None = None


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `/v1/embeddings`."""

    input: str | list[str | TokenId | list[TokenId]]
    model: Annotated[str, Meta(max_length=512)] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: PositiveInt | None = None
    user: str | None = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `/tokenize`: a text or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessageParam], Meta(min_length=1)] | None = None
    tools: list[ToolParam] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False
    chat_template_kwargs: JsonObject | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `/detokenize`."""

    tokens: list[TokenId]
    model: str | None = None


class SleepRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `/sleep`."""

    level: Annotated[int, Meta(ge=1, le=2)] = 1
    """1 keeps the weights in host memory, 2 drops them."""


class WakeUpRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `/wake_up`."""

    tags: Annotated[list[Literal["weights", "kv_cache"]], Meta(min_length=1)] | None = None
    """What wakes; all of it where nothing is said."""


class UpdateWeightsRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `/update_weights`."""

    path: Annotated[str, Meta(min_length=1)]
    """A folder of weights that the server can read."""
