"""From the body of a request to what is asked of the engine."""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling.structured_output import MAX_GRAMMAR_CHARS
from meshwright.run.serve.sampling_params import (
    SamplingParams,
    StructuredOutputsKind,
    StructuredOutputsParams,
)
from meshwright.run.serve.server.api_errors import ApiError, invalid_request, unservable_request
from meshwright.run.serve.server.protocol.request_schema import (
    ChatCompletionRequest,
    ChatMessageParam,
    CompletionRequest,
    ResponseFormat,
    SamplingFields,
    StructuredOutputsField,
)
from meshwright.run.serve.server.server_config import ServerConfig
from meshwright.run.serve.server.tokenization import (
    PromptEncoder,
    validate_token_ids,
)
from meshwright.run.serve.tokenizer.message_format import normalize_message
from meshwright.run.serve.tokenizer.tokenizer_like import TokenizerLike
from meshwright.spec.name_suggestions import format_suggestion

TOKEN_ID_PATTERN = re.compile(r"0|[1-9][0-9]{0,9}")
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1000
FIELD_ALIASES = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seed", "min_tokens", "ignore_eos", "n"),
)
"""Fields that bodies and `SamplingParams` call alike."""


def resolve_model(name: str | None, settings: ServerConfig) -> str:
    """Return the model that a request means; one that names none means the server's."""
    if not name:
        return settings.model
    if name not in settings.served_model_names():
        raise ApiError(
            404,
            f"The model `{name}` is not served here: "
            f"{format_suggestion(name, settings.served_model_names())}",
            param="model",
            code="model_not_found",
        )
    return name


def resolve_lora(model: str, settings: ServerConfig) -> str | None:
    """Return the adapter that a model's name stands for."""
    return model if model in settings.lora_names else None


def _forms(
    body: SamplingFields, form: ResponseFormat | None
) -> list[tuple[str, StructuredOutputsKind, Mapping[str, Any] | list[str] | str]]:
    """Return the forms that an answer must have, each with the field that says so."""
    told = body.structured_outputs or StructuredOutputsField()
    schema = _schema_of(form) if form is not None and form.type == "json_schema" else None
    any_json = form is not None and form.type == "json_object"
    given: list[tuple[str, StructuredOutputsKind, Mapping[str, Any] | list[str] | str | None]] = [
        ("guided_json", "json_schema", body.guided_json),
        ("guided_regex", "regex", body.guided_regex),
        ("guided_choice", "choice", body.guided_choice),
        ("guided_grammar", "grammar", body.guided_grammar),
        ("structured_outputs.json", "json_schema", told.json),
        ("structured_outputs.json_object", "json_object", "" if told.json_object else None),
        ("structured_outputs.regex", "regex", told.regex),
        ("structured_outputs.choice", "choice", told.choice),
        ("structured_outputs.grammar", "grammar", told.grammar),
        ("response_format", "json_schema", schema),
        ("response_format", "json_object", "" if any_json else None),
    ]
    return [(name, kind, value) for name, kind, value in given if value is not None]


def build_structured_outputs(
    body: SamplingFields, form: ResponseFormat | None
) -> StructuredOutputsParams | None:
    """Return what the answer must look like; a request may say so once."""
    found = _forms(body, form)
    if len(found) > 1:
        names = [name for name, _, _ in found]
        raise invalid_request(f"{' and '.join(names)} exclude each other: give one", names[-1])
    for name, kind, value in found:
        if value == []:
            raise invalid_request(f"`{name}` has nothing to choose from", name)
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        return StructuredOutputsParams(kind=kind, text=_check_grammar_length(text, name))
    return None


def _check_grammar_length(text: str, param: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise invalid_request(
            f"`{param}` has {len(text):,} characters, and {MAX_GRAMMAR_CHARS:,} are taken", param
        )
    return text


def get_request_field_names(body: CompletionRequest | ChatCompletionRequest) -> dict[str, str]:
    """Return what a request calls things that the engine has names of its own for."""
    fields = {"lora_name": "model"}
    if isinstance(body, ChatCompletionRequest):
        fields |= {"prompt": "messages", "logprobs": "top_logprobs"}
        if body.max_completion_tokens is not None:
            fields["max_tokens"] = "max_completion_tokens"
        if body.tools:
            # A call that is demanded is bound by the schemas of its tools.
            fields |= dict.fromkeys(("structured_outputs", "json_schema", "json_object"), "tools")
    for name, kind, _ in _forms(body, body.response_format):
        fields |= {"structured_outputs": name, kind: name}
    return fields


def _schema_of(form: ResponseFormat) -> Mapping[str, Any]:
    if form.json_schema is None or form.json_schema.schema is None:
        where = "response_format.json_schema.schema"
        raise invalid_request(f"`{where}` is missing: the type is json_schema", where)
    return form.json_schema.schema


def build_json_schema_params(schema: Mapping[str, Any]) -> StructuredOutputsParams:
    """Return the grammar of a JSON schema."""
    text = _check_grammar_length(msgspec.json.encode(schema).decode(), "tools")
    return StructuredOutputsParams(kind="json_schema", text=text)


def build_sampling_params(
    body: SamplingFields,
    settings: ServerConfig,
    tokenizer: TokenizerLike,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    grammar: StructuredOutputsParams | None,
) -> SamplingParams:
    """Return how a request wants its tokens drawn; what it leaves out is the model's default."""
    if body.n is not None and body.n > settings.max_n:
        raise invalid_request(f"`n` must be at most {settings.max_n}.", "n")
    if body.stream_options is not None and not body.stream:
        raise invalid_request(
            "`stream_options` is only for streams: set `stream`", "stream_options"
        )
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > MAX_STOP_STRINGS or any(not 0 < len(text) <= MAX_STOP_LENGTH for text in stop):
        raise invalid_request(
            f"`stop` takes up to {MAX_STOP_STRINGS} texts of 1 to {MAX_STOP_LENGTH} characters",
            "stop",
        )
    chosen: dict[str, Any] = {
        name: value for name in FIELD_ALIASES if (value := getattr(body, name)) is not None
    }
    if body.logit_bias:
        chosen["logit_bias"] = _parse_logit_bias(body.logit_bias, tokenizer)
    if body.top_k is not None:
        chosen["top_k"] = max(body.top_k, 0)  # vLLM's -1 means all, as 0 does
    if stop:
        chosen["stop"] = stop
    if body.stop_token_ids:
        chosen["stop_token_ids"] = validate_token_ids(
            body.stop_token_ids, tokenizer, "stop_token_ids"
        )
    try:
        return msgspec.structs.replace(
            settings.default_sampling_params,
            **chosen,
            max_tokens=max_tokens,
            logprobs=logprobs,
            structured_outputs=grammar,
        )
    except InputError as error:
        raise unservable_request(error) from None


def _parse_logit_bias(given: Mapping[str, float], tokenizer: TokenizerLike) -> dict[int, float]:
    """Return the bias by token; only its bounded number of entries is ever keyed by numbers."""
    bias: dict[int, float] = {}
    for text, value in given.items():
        if not TOKEN_ID_PATTERN.fullmatch(text):
            raise invalid_request(
                f"`logit_bias` has the key {text[:40]!r}; use the number of a token, such as "
                '"1234"',
                "logit_bias",
                "invalid_type",
            )
        bias[int(text)] = value
    validate_token_ids(list(bias), tokenizer, "logit_bias")
    return bias


def bound_max_tokens(
    prompt: tuple[int, ...],
    sampling: SamplingParams,
    *,
    length: int,
    settings: ServerConfig,
    param: str,
    limit: str,
    default: int | None = None,
) -> SamplingParams:
    """Return the sampling with its largest number of tokens, where prompt and answer have room.

    Args:
        prompt: The tokens of the prompt.
        sampling: What was asked for.
        length: Tokens of a prompt with its answer that the engine has room for.
        settings: The server's.
        param: The field that the prompt came from.
        limit: The field that says how many tokens may come.
        default: How many may come at most where it is not given; None is all there is room for.
    """
    most = min(length - 1, settings.max_prompt_tokens or length)
    if not prompt:
        raise invalid_request(f"`{param}` has no tokens: give at least one", param)
    if len(prompt) > most:
        raise invalid_request(
            f"{_context(length)} `{param}` has {len(prompt)}; at most {most} are taken here",
            param,
            "context_length_exceeded",
        )
    left = length - len(prompt)
    wanted = sampling.max_tokens
    if wanted is None and default is not None:
        wanted = min(default, left)
    if wanted is not None and wanted > left:
        raise invalid_request(
            f"{_context(length)} `{limit}` is {wanted}; a prompt of {len(prompt)} leaves {left}",
            limit,
            "context_length_exceeded",
        )
    if sampling.min_tokens > (left if wanted is None else wanted):
        raise invalid_request(
            f"`min_tokens` is {sampling.min_tokens}, more than may come", "min_tokens"
        )
    return msgspec.structs.replace(sampling, max_tokens=left if wanted is None else wanted)


def _context(length: int) -> str:
    """Say how much there is room for, in the words by which clients know such an error."""
    return f"This model's maximum context length is {length} tokens."


def encode_prompts(
    given: str | list[str | int | list[int]],
    encoder: PromptEncoder,
    *,
    param: str,
    max_prompts: int,
    max_tokens: int,
    special: bool = True,
) -> list[tuple[int, ...]]:
    """Return the tokens of each prompt, however the prompts were written."""
    if isinstance(given, list) and given and isinstance(given[0], int):
        if not all(isinstance(token, int) for token in given):
            raise invalid_request(f"`{param}` mixes tokens with other things", param)
        prompt = [token for token in given if isinstance(token, int)]
        return [validate_token_ids(prompt, encoder.tokenizer, param)]
    several = [given] if isinstance(given, str) else given
    if not 0 < len(several) <= max_prompts:
        raise invalid_request(
            f"`{param}` has {len(several)} prompts; give 1 to {max_prompts}", param
        )
    prompts = []
    for prompt_input in several:
        if isinstance(prompt_input, int):
            raise invalid_request(f"`{param}` mixes tokens with other things", param)
        if isinstance(prompt_input, str):
            prompts.append(
                encoder.encode_text(prompt_input, param, special=special, max_tokens=max_tokens)
            )
        else:
            prompts.append(validate_token_ids(prompt_input, encoder.tokenizer, param))
        if len(prompts[-1]) > max_tokens:
            return prompts  # its length will be refused, whatever the others have
    return prompts


def build_requests(
    prompts: list[tuple[int, ...]],
    sampling: SamplingParams,
    body: CompletionRequest | ChatCompletionRequest,
    *,
    max_model_len: int,
    config: ServerConfig,
    lora_name: str | None,
    prompt_logprobs: int | None = None,
    default: int | None = None,
) -> list[Request]:
    """Return one ask for each prompt."""
    fields = get_request_field_names(body)
    param, limit = fields.get("prompt", "prompt"), fields.get("max_tokens", "max_tokens")
    return [
        Request(
            prompt_token_ids=prompt,
            sampling_params=bound_max_tokens(
                prompt,
                sampling,
                length=max_model_len,
                settings=config,
                param=param,
                limit=limit,
                default=default,
            ),
            # Clients of vLLM know the lower number as the one that goes first.
            priority=-(body.priority or 0),
            tenant=body.user or "",
            lora_name=lora_name,
            prompt_logprobs=prompt_logprobs,
        )
        for prompt in prompts
    ]


def require_chat_template_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    """Return what a request gives the template beside messages and tools."""
    if clash := {"messages", "self", "tools"} & (given or {}).keys():
        where = f"chat_template_kwargs.{min(clash)}"
        raise invalid_request(f"`{where}` cannot be given here", where)
    return given or {}


_READ = (
    "role", "content", "name", "refusal", "tool_calls", "tool_call_id", "reasoning_content",
    "reasoning",
)  # fmt: skip
"""Fields of a message that templates see; clients send more of earlier answers back."""


ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""Roles of the OpenAI API; chat templates may name others, such as Llama 3's `ipython`."""


def check_roles(messages: list[ChatMessageParam], encoder: PromptEncoder) -> None:
    """Raise where a message has a role that neither the API nor the model's template knows."""
    for at, message in enumerate(messages):
        if message.role not in ROLES and not encoder.names_role(message.role):
            where = f"messages[{at}].role"
            raise invalid_request(
                f"`{where}` is {message.role!r}; use {', '.join(ROLES)}, or a role that the "
                "model's chat template names",
                where,
                "invalid_role",
            )


def convert_chat_messages(messages: list[ChatMessageParam]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them: without nulls, arguments as objects."""
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _message(message: ChatMessageParam, where: str) -> dict[str, Any]:
    sent = {name: getattr(message, name) for name in _READ}
    try:
        return normalize_message(msgspec.to_builtins(sent))
    except InputError as error:
        (problem,) = error.problems
        said = f"{where}.{problem.where}" if problem.where else where
        path = said if problem.where else f"{where}.content"
        raise invalid_request(f"`{said}` {problem.what}", path) from None
