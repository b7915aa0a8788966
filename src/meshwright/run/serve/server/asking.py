"""From the body of a request to what is asked of the engine."""

from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.errors import InputError
from meshwright.run.serve.asked import Ask, Grammar, GrammarKind, Sampling
from meshwright.run.serve.model.messages import plain_message
from meshwright.run.serve.server.bodies import (
    ChatBody,
    CompletionBody,
    Drawn,
    Message,
    ResponseFormat,
    StructuredOutputs,
)
from meshwright.run.serve.server.faults import Fault, impossible, refused
from meshwright.run.serve.server.settings import ServerSettings
from meshwright.run.serve.server.words import Words, checked, encoded
from meshwright.spec.names import suggestion

MOST_STOPS = 16
LONGEST_STOP = 1000
SAME_NAMES = (
    *("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "min_tokens", "ignore_eos", "n"),
)
"""Fields that bodies and `Sampling` call alike."""


def named_model(name: str | None, settings: ServerSettings) -> str:
    """Return the model that a request means; one that names none means the server's."""
    if not name:
        return settings.model
    if name not in settings.names():
        raise Fault(
            404,
            f"The model `{name}` is not served here: {suggestion(name, settings.names())}",
            param="model",
            code="model_not_found",
        )
    return name


def adapter_of(model: str, settings: ServerSettings) -> str | None:
    """Return the adapter that a model's name stands for."""
    return model if model in settings.adapters else None


def _forms(
    body: Drawn, form: ResponseFormat | None
) -> list[tuple[str, GrammarKind, Mapping[str, Any] | list[str] | str]]:
    """Return the forms that an answer must have, each with the field that says so."""
    told = body.structured_outputs or StructuredOutputs()
    schema = _schema_of(form) if form is not None and form.type == "json_schema" else None
    any_json = form is not None and form.type == "json_object"
    given: list[tuple[str, GrammarKind, Mapping[str, Any] | list[str] | str | None]] = [
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


def grammar_of(body: Drawn, form: ResponseFormat | None) -> Grammar | None:
    """Return what the answer must look like; a request may say so once."""
    found = _forms(body, form)
    if len(found) > 1:
        names = [name for name, _, _ in found]
        raise refused(f"{' and '.join(names)} exclude each other: give one", names[-1])
    for name, kind, value in found:
        if value == []:
            raise refused(f"`{name}` has nothing to choose from", name)
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        return Grammar(kind=kind, text=text)
    return None


def fields_of(body: CompletionBody | ChatBody) -> dict[str, str]:
    """Return what a request calls things that the engine has names of its own for."""
    fields = {"stop_tokens": "stop_token_ids", "adapter": "model"}
    if isinstance(body, ChatBody):
        fields |= {"prompt": "messages", "logprobs": "top_logprobs"}
        if body.max_completion_tokens is not None:
            fields["max_tokens"] = "max_completion_tokens"
        if body.tools:
            # A call that is demanded is bound by the schemas of its tools.
            fields |= dict.fromkeys(("grammar", "json_schema", "json_object"), "tools")
    for name, kind, _ in _forms(body, body.response_format):
        fields |= {"grammar": name, kind: name}
    return fields


def _schema_of(form: ResponseFormat) -> Mapping[str, Any]:
    if form.json_schema is None or form.json_schema.schema is None:
        where = "response_format.json_schema.schema"
        raise refused(f"`{where}` is missing: the type is json_schema", where)
    return form.json_schema.schema


def schema_grammar(schema: Mapping[str, Any]) -> Grammar:
    """Return the grammar of a JSON schema."""
    return Grammar(kind="json_schema", text=msgspec.json.encode(schema).decode())


def sampling_of(
    body: Drawn,
    settings: ServerSettings,
    words: Words,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    grammar: Grammar | None,
) -> Sampling:
    """Return how a request wants its tokens drawn; what it leaves out is the model's default."""
    if body.n is not None and body.n > settings.choices:
        raise refused(f"`n` is {body.n}; this server answers at most {settings.choices} times", "n")
    if body.stream_options is not None and not body.stream:
        raise refused("`stream_options` is only for streams: set `stream`", "stream_options")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > MOST_STOPS or any(not 0 < len(text) <= LONGEST_STOP for text in stop):
        raise refused(
            f"`stop` takes up to {MOST_STOPS} texts of 1 to {LONGEST_STOP} characters", "stop"
        )
    checked(list(body.logit_bias or ()), words, "logit_bias")
    chosen: dict[str, Any] = {
        name: value for name in SAME_NAMES if (value := getattr(body, name)) is not None
    }
    if body.top_k is not None:
        chosen["top_k"] = max(body.top_k, 0)  # vLLM's -1 means all, as 0 does
    if stop:
        chosen["stop"] = stop
    if body.stop_token_ids:
        chosen["stop_tokens"] = checked(body.stop_token_ids, words, "stop_token_ids")
    try:
        return msgspec.structs.replace(
            settings.sampling,
            **chosen,
            max_tokens=max_tokens,
            logprobs=logprobs,
            grammar=grammar,
        )
    except InputError as error:
        raise impossible(error) from None


def bounded(
    prompt: tuple[int, ...],
    sampling: Sampling,
    *,
    length: int,
    settings: ServerSettings,
    param: str,
    limit: str,
    default: int | None = None,
) -> Sampling:
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
    most = min(length - 1, settings.prompt_tokens or length)
    if not prompt:
        raise refused(f"`{param}` has no tokens: give at least one", param)
    if len(prompt) > most:
        raise refused(
            f"{_context(length)} `{param}` has {len(prompt)}; at most {most} are taken here",
            param,
            "context_length_exceeded",
        )
    left = length - len(prompt)
    wanted = sampling.max_tokens
    if wanted is None and default is not None:
        wanted = min(default, left)
    if wanted is not None and wanted > left:
        raise refused(
            f"{_context(length)} `{limit}` is {wanted}; a prompt of {len(prompt)} leaves {left}",
            limit,
            "context_length_exceeded",
        )
    if sampling.min_tokens > (left if wanted is None else wanted):
        raise refused(f"`min_tokens` is {sampling.min_tokens}, more than may come", "min_tokens")
    return msgspec.structs.replace(sampling, max_tokens=left if wanted is None else wanted)


def _context(length: int) -> str:
    """Say how much there is room for, in the words by which clients know such an error."""
    return f"This model's maximum context length is {length} tokens."


async def prompts_of(
    given: str | list[str | int | list[int]],
    words: Words,
    *,
    param: str,
    most: int,
    special: bool = True,
) -> list[tuple[int, ...]]:
    """Return the tokens of each prompt, however the prompts were written."""
    if isinstance(given, list) and given and isinstance(given[0], int):
        if not all(isinstance(one, int) for one in given):
            raise refused(f"`{param}` mixes tokens with other things", param)
        return [checked([one for one in given if isinstance(one, int)], words, param)]
    several = [given] if isinstance(given, str) else given
    if not 0 < len(several) <= most:
        raise refused(f"`{param}` has {len(several)} prompts; give 1 to {most}", param)
    prompts = []
    for one in several:
        if isinstance(one, int):
            raise refused(f"`{param}` mixes tokens with other things", param)
        if isinstance(one, str):
            prompts.append(await encoded(words, one, param, special=special))
        else:
            prompts.append(checked(one, words, param))
    return prompts


def asks_of(
    prompts: list[tuple[int, ...]],
    sampling: Sampling,
    body: CompletionBody | ChatBody,
    *,
    length: int,
    settings: ServerSettings,
    tenant: str,
    adapter: str | None,
    prompt_logprobs: int | None = None,
    shown: tuple[str, ...] = (),
    default: int | None = None,
) -> list[Ask]:
    """Return one ask for each prompt."""
    fields = fields_of(body)
    param, limit = fields.get("prompt", "prompt"), fields.get("max_tokens", "max_tokens")
    return [
        Ask(
            prompt=prompt,
            sampling=bounded(
                prompt,
                sampling,
                length=length,
                settings=settings,
                param=param,
                limit=limit,
                default=default,
            ),
            # Clients of vLLM know the lower number as the one that goes first.
            priority=-(body.priority or 0),
            tenant=tenant or body.user or "",
            adapter=adapter,
            prompt_logprobs=prompt_logprobs,
            shown=shown,
        )
        for prompt in prompts
    ]


def own_values(given: dict[str, Any] | None) -> dict[str, Any]:
    """Return what a request gives the template beside messages and tools."""
    if clash := {"messages", "self", "tools"} & (given or {}).keys():
        where = f"chat_template_kwargs.{min(clash)}"
        raise refused(f"`{where}` cannot be given here", where)
    return given or {}


_READ = (
    "role", "content", "name", "refusal", "tool_calls", "tool_call_id", "reasoning_content",
    "reasoning",
)  # fmt: skip
"""Fields of a message that templates see; clients send more of earlier answers back."""


def messages_of(messages: list[Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates read them: without nulls, arguments as objects."""
    return [_message(message, f"messages[{at}]") for at, message in enumerate(messages)]


def _message(message: Message, where: str) -> dict[str, Any]:
    sent = {name: getattr(message, name) for name in _READ}
    try:
        return plain_message(msgspec.to_builtins(sent))
    except InputError as error:
        (problem,) = error.problems
        said = f"{where}.{problem.where}" if problem.where else where
        path = said if problem.where else f"{where}.content"
        raise refused(f"`{said}` {problem.what}", path) from None
