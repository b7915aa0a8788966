"""`RequestPreparer`: decodes, checks, renders and tokenises bodies, in whatever process it runs."""

from typing import Any, TypeVar

import msgspec

from meshwright.run.serve.server.api_errors import ApiError, invalid_request
from meshwright.run.serve.server.input_processing.prepared_request import (
    InputLimits,
    Prepared,
    PreparedAnswer,
    PreparedChat,
    PreparedCompletion,
    PreparedEmbedding,
    RequestKind,
)
from meshwright.run.serve.server.protocol.request_conversion import (
    build_requests,
    build_sampling_params,
    build_structured_outputs,
    check_roles,
    convert_chat_messages,
    encode_prompts,
    get_request_field_names,
    require_chat_template_kwargs,
    resolve_lora,
    resolve_model,
)
from meshwright.run.serve.server.protocol.request_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    StreamOptions,
    TokenizeRequest,
)
from meshwright.run.serve.server.protocol.response_schema import (
    DetokenizeResponse,
    TokenizeResponse,
)
from meshwright.run.serve.server.protocol.tool_choice import (
    check_tools,
    resolve_tool_choice,
    to_template_tool,
)
from meshwright.run.serve.server.request_decoder import decode_body
from meshwright.run.serve.server.server_config import ServerConfig
from meshwright.run.serve.server.sse import UsageReporting, encode
from meshwright.run.serve.server.tokenization import (
    PromptEncoder,
    too_many_tokens,
    validate_token_ids,
)
from meshwright.run.serve.tokenizer.tokenizer_like import TokenizerLike

DEFAULT_MAX_TOKENS = 16
"""What `/v1/completions` of the OpenAI API continues by."""
MAX_PROMPT_LOGPROBS = 2**17
"""Alternatives that may be told of the tokens of one prompt, which come all at once."""
TOKENIZE_CONTEXTS = 8
MIN_TOKENIZE_TOKENS = 2**20
"""`/tokenize` counts texts of up to so many contexts, or at least so many tokens."""
BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class RequestPreparer:
    """Prepares the requests of one server."""

    def __init__(self, tokenizer: TokenizerLike, config: ServerConfig) -> None:
        self._config = config
        self._encoder = PromptEncoder(tokenizer)

    def prepare(self, kind: RequestKind, data: bytes, limits: InputLimits) -> Prepared:
        """Return what a body asks for.

        Raises:
            ApiError: Where it asks for nothing that can be answered.
        """
        try:
            match kind:
                case "chat":
                    return self._chat(decode_body(data, ChatCompletionRequest), limits)
                case "completion":
                    return self._completion(decode_body(data, CompletionRequest), limits)
                case "embedding":
                    return self._embedding(decode_body(data, EmbeddingRequest), limits)
                case "tokenize":
                    return self._tokenize(decode_body(data, TokenizeRequest), limits)
                case "detokenize":
                    return self._detokenize(decode_body(data, DetokenizeRequest), limits)
        except RecursionError:
            raise ApiError(400, "The body is nested too deeply", code="invalid_json") from None

    def _max_prompt_tokens(self, limits: InputLimits) -> int:
        room = max(limits.max_model_len - 1, 0)
        return min(room, self._config.max_prompt_tokens or room)

    def _chat(self, body: ChatCompletionRequest, limits: InputLimits) -> PreparedChat:
        model = resolve_model(body.model, self._config)
        if body.max_tokens and body.max_completion_tokens not in (None, body.max_tokens):
            raise invalid_request(
                "`max_tokens` and `max_completion_tokens` differ: give one", "max_tokens"
            )
        if body.top_logprobs and not body.logprobs:
            raise invalid_request("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
        tools = resolve_tool_choice(body)
        grammar = build_structured_outputs(body, body.response_format)
        if grammar is not None and tools.structured_outputs is not None:
            raise invalid_request(
                "`tool_choice` demands a call, which excludes another form", "tool_choice"
            )
        sampling = build_sampling_params(
            body,
            self._config,
            self._encoder.tokenizer,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=grammar or tools.structured_outputs,
        )
        check_roles(body.messages, self._encoder)
        prompt = self._encoder.encode_chat(
            convert_chat_messages(body.messages),
            tools.template_tools,
            _template_values(body),
            max_tokens=self._max_prompt_tokens(limits),
            continues=bool(body.continue_final_message),
        )
        lora_name = resolve_lora(model, self._config)
        return PreparedChat(
            model=model,
            lora_name=lora_name,
            requests=build_requests(
                [prompt],
                sampling,
                body,
                max_model_len=limits.max_model_len,
                config=self._config,
                lora_name=lora_name,
            ),
            field_names=get_request_field_names(body),
            tools=tools._replace(template_tools=None, structured_outputs=None),
            constrained=grammar is not None,
            stream=bool(body.stream),
            usage=usage_reporting(body.stream_options),
            logprobs=bool(body.logprobs),
            return_token_ids=bool(body.return_token_ids),
        )

    def _completion(self, body: CompletionRequest, limits: InputLimits) -> PreparedCompletion:
        config = self._config
        model = resolve_model(body.model, config)
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise invalid_request("`best_of` greater than `n` is not supported.", "best_of")
        if body.suffix:
            raise invalid_request("`suffix` is not supported.", "suffix")
        most = body.max_tokens
        if most == 0 and not body.echo:
            raise invalid_request(
                "`max_tokens` is 0, which only `echo` has a use for", "max_tokens"
            )
        sampling = build_sampling_params(
            body,
            config,
            self._encoder.tokenizer,
            # The engine has no answer of no tokens; the one that comes is not shown.
            max_tokens=None if most is None else max(most, 1),
            logprobs=body.logprobs,
            grammar=build_structured_outputs(body, body.response_format),
        )
        prompts = encode_prompts(
            body.prompt,
            self._encoder,
            param="prompt",
            max_prompts=config.max_prompts_per_request,
            max_tokens=self._max_prompt_tokens(limits),
            special=body.add_special_tokens is not False,
        )
        if body.echo and body.logprobs:
            _check_prompt_logprobs(prompts, body.logprobs)
        lora_name = resolve_lora(model, config)
        return PreparedCompletion(
            model=model,
            lora_name=lora_name,
            requests=build_requests(
                prompts,
                sampling,
                body,
                max_model_len=limits.max_model_len,
                config=config,
                lora_name=lora_name,
                prompt_logprobs=body.logprobs if body.echo else None,
                default=DEFAULT_MAX_TOKENS,
            ),
            field_names=get_request_field_names(body),
            texts=[_text_of(body.prompt, at) for at in range(len(prompts))] if body.echo else [],
            echo=bool(body.echo),
            hide_output=most == 0,
            stream=bool(body.stream),
            usage=usage_reporting(body.stream_options),
            logprobs=body.logprobs,
            return_token_ids=bool(body.return_token_ids),
        )

    def _embedding(self, body: EmbeddingRequest, limits: InputLimits) -> PreparedEmbedding:
        config = self._config
        model = resolve_model(body.model, config)
        if body.dimensions is not None:
            raise invalid_request("`dimensions` is not supported: vectors come whole", "dimensions")
        most = min(limits.max_embed_len, config.max_prompt_tokens or limits.max_embed_len)
        prompts = encode_prompts(
            body.input,
            self._encoder,
            param="input",
            max_prompts=config.max_prompts_per_request,
            max_tokens=most,
        )
        for at, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= most:
                raise invalid_request(
                    f"`input` {at} has {len(prompt)} tokens; 1 to {most} are taken here",
                    "input",
                    "context_length_exceeded" if prompt else None,
                )
        return PreparedEmbedding(
            model=model,
            lora_name=resolve_lora(model, config),
            prompts=prompts,
            base64=body.encoding_format == "base64",
        )

    def _tokenize(self, body: TokenizeRequest, limits: InputLimits) -> PreparedAnswer:
        resolve_model(body.model, self._config)
        if (body.prompt is None) == (body.messages is None):
            raise invalid_request("Give either `prompt` or `messages`", "prompt")
        most = max(TOKENIZE_CONTEXTS * limits.max_model_len, MIN_TOKENIZE_TOKENS)
        if body.prompt is not None:
            special = body.add_special_tokens is not False
            tokens = self._encoder.encode_text(
                body.prompt, "prompt", special=special, max_tokens=most
            )
        else:
            values = {
                "add_generation_prompt": body.add_generation_prompt,
                **require_chat_template_kwargs(body.chat_template_kwargs),
            }
            check_tools(body.tools or ())
            tools = [to_template_tool(tool.function) for tool in body.tools or ()] or None
            check_roles(body.messages or [], self._encoder)
            messages = convert_chat_messages(body.messages or [])
            tokens = self._encoder.encode_chat(messages, tools, values, max_tokens=most)
        texts = None
        if body.return_token_strs:
            spell = self._encoder.tokenizer.token_bytes
            texts = [spell(token).decode(errors="replace") for token in tokens]
        answer = TokenizeResponse(
            count=len(tokens),
            max_model_len=limits.max_model_len,
            tokens=list(tokens),
            token_strs=texts,
        )
        return PreparedAnswer(body=encode(answer))

    def _detokenize(self, body: DetokenizeRequest, limits: InputLimits) -> PreparedAnswer:
        resolve_model(body.model, self._config)
        most = max(TOKENIZE_CONTEXTS * limits.max_model_len, MIN_TOKENIZE_TOKENS)
        if len(body.tokens) > most:
            raise too_many_tokens("tokens", most)
        tokens = validate_token_ids(body.tokens, self._encoder.tokenizer, "tokens")
        return PreparedAnswer(
            body=encode(DetokenizeResponse(self._encoder.decode(tokens, "tokens")))
        )


def _check_prompt_logprobs(prompts: list[tuple[int, ...]], logprobs: int) -> None:
    longest = max(map(len, prompts), default=0)
    if longest * logprobs > MAX_PROMPT_LOGPROBS:
        raise invalid_request(
            f"`logprobs` is {logprobs} for a prompt of {longest} tokens; with `echo`, their product"
            f" may be {MAX_PROMPT_LOGPROBS}",
            "logprobs",
        )


def usage_reporting(options: StreamOptions | None) -> UsageReporting:
    """Return when a stream tells the counts of tokens."""
    if options is None or not (options.include_usage or options.continuous_usage_stats):
        return "never"
    return "always" if options.continuous_usage_stats else "last"


def _template_values(body: ChatCompletionRequest) -> dict[str, Any]:
    """Return what the template is given beside messages and tools."""
    begins = body.add_generation_prompt
    if begins and body.continue_final_message:
        what = "`continue_final_message` goes on with an answer, and `add_generation_prompt` begins"
        raise invalid_request(f"{what} one: give one of both", "continue_final_message")
    values: dict[str, Any] = {
        "add_generation_prompt": not body.continue_final_message if begins is None else begins
    }
    if body.reasoning_effort is not None:
        values["reasoning_effort"] = body.reasoning_effort
    return {**values, **require_chat_template_kwargs(body.chat_template_kwargs)}


def _text_of(prompts: str | list[str | int | list[int]], at: int) -> str | None:
    """Return a prompt as it was written; None where it was given as tokens."""
    prompt = prompts if isinstance(prompts, str) else prompts[at]
    return prompt if isinstance(prompt, str) else None
