"""`/v1/chat/completions`: messages answered."""

from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.run.serve.output.output_delta import OutputDelta, OutputParser
from meshwright.run.serve.request import RequestOutput, TokenLogprob
from meshwright.run.serve.server.admission import RequestContext
from meshwright.run.serve.server.api_errors import invalid_request
from meshwright.run.serve.server.app_state import AppState, ResponseBody
from meshwright.run.serve.server.openai.choice_stream import ChoiceStream
from meshwright.run.serve.server.protocol.logprobs_format import format_chat_logprobs
from meshwright.run.serve.server.protocol.request_conversion import (
    build_requests,
    build_sampling_params,
    build_structured_outputs,
    convert_chat_messages,
    get_request_field_names,
    require_chat_template_kwargs,
    resolve_lora,
    resolve_model,
)
from meshwright.run.serve.server.protocol.request_schema import ChatCompletionRequest
from meshwright.run.serve.server.protocol.response_schema import (
    ChatCompletionResponse,
    ChatResponseChoice,
    ChatResponseMessage,
    OpenAIFinishReason,
    ResponseFunctionCall,
    ResponseToolCall,
)
from meshwright.run.serve.server.protocol.tool_choice import resolve_tool_choice
from meshwright.run.serve.server.sse import ChunkTemplate, TokenCounter, encode
from meshwright.run.serve.server.tokenization import encode_chat_prompt
from meshwright.run.serve.tokenizer.tokenizer_like import TokenizerLike


async def create_chat_completion(
    app_state: AppState, body: ChatCompletionRequest, context: RequestContext
) -> ResponseBody:
    """Answer a chat."""
    settings = app_state.config
    model = resolve_model(body.model, settings)
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
        settings,
        app_state.tokenizer,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar or tools.structured_outputs,
    )
    prompt = await encode_chat_prompt(
        app_state.tokenizer,
        convert_chat_messages(body.messages),
        tools.template_tools,
        collect_template_values(body),
        goes_on=bool(body.continue_final_message),
    )
    maker = app_state.output_parsers.parser_builder(tools, prompt, constrained=grammar is not None)
    (ask,) = build_requests(
        [prompt],
        sampling,
        body,
        length=app_state.engine.max_model_len,
        settings=settings,
        tenant=context.tenant,
        adapter=resolve_lora(model, settings),
        shown=app_state.output_parsers.visible_special_tokens(tools),
    )
    context.field_names = get_request_field_names(body)
    replies = app_state.submit([ask], context)
    told = bool(body.logprobs)
    ids = bool(body.return_token_ids)
    name = f"chatcmpl-{context.request_id}"
    if body.stream:
        frame = ChunkTemplate(
            name,
            "chat.completion.chunk",
            app_state.current_time_s(),
            model,
            app_state.usage_reporting(body.stream_options),
        )
        said = [
            ChatChoiceEvents(at, maker, context.request_id, app_state.tokenizer, tell_ids=ids)
            for at in range(sampling.n)
        ]
        return ChoiceStream(replies, said, frame)
    whole = [ChatChoiceCollector(at, maker, context.request_id) for at in range(sampling.n)]
    while pieces := (await replies.next_outputs())[1]:
        for piece in pieces:
            whole[piece.index].add(piece)
    return encode(
        ChatCompletionResponse(
            id=name,
            created=app_state.current_time_s(),
            model=model,
            choices=[
                one.build_choice(app_state.tokenizer, tell=told, tell_ids=ids) for one in whole
            ],
            usage=replies.build_usage(),
            prompt_token_ids=list(prompt) if ids else msgspec.UNSET,
        )
    )


def collect_template_values(body: ChatCompletionRequest) -> dict[str, Any]:
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


OutputParserBuilder = Callable[[], OutputParser] | None
"""Makes the reader of one choice; None where all is content."""


def format_tool_call_id(request: str, choice: int, call: int) -> str:
    """Return the name of a tool call."""
    return f"call_{request}_{choice}_{call}"


def to_openai_finish_reason(output: RequestOutput, calls: int) -> OpenAIFinishReason:
    """Return how a choice ended."""
    if output.finish_reason == "length":
        return "length"
    return "tool_calls" if calls else "stop"


class ChatChoiceCollector:
    """One choice that is told at its end."""

    def __init__(self, index: int, maker: OutputParserBuilder, request: str) -> None:
        self._index = index
        self._reader = maker() if maker is not None else None
        self._request = request
        self._heard: list[OutputDelta] = []
        self._last = RequestOutput()
        self._logprobs: list[TokenLogprob] = []
        self._tokens: list[int] = []

    def add(self, output: RequestOutput) -> None:
        """Add a piece."""
        if output.text:
            self._heard += (
                self._reader.feed(output.text) if self._reader else [OutputDelta(output.text)]
            )
        if output.finish_reason is not None:
            self._heard += self._reader.flush() if self._reader else []
            self._last = output
        self._logprobs.extend(output.logprobs)
        self._tokens.extend(output.token_ids)

    def build_choice(
        self, tokenizer: TokenizerLike, *, tell: bool, tell_ids: bool
    ) -> ChatResponseChoice:
        """Return it as a whole."""
        content = "".join(heard.content for heard in self._heard)
        thoughts = "".join(heard.reasoning for heard in self._heard)
        calls: dict[int, list[str]] = {}
        for heard in self._heard:
            if heard.tool_index is not None:
                named = calls.setdefault(heard.tool_index, ["", ""])
                named[0] += heard.name
                named[1] += heard.arguments
        message = ChatResponseMessage(
            content=None if calls and not content else content,
            reasoning_content=thoughts or msgspec.UNSET,
            tool_calls=[
                ResponseToolCall(
                    id=format_tool_call_id(self._request, self._index, at),
                    function=ResponseFunctionCall(*named),
                )
                for at, named in calls.items()
            ]
            or msgspec.UNSET,
        )
        return ChatResponseChoice(
            index=self._index,
            message=message,
            logprobs=format_chat_logprobs(self._logprobs, tokenizer) if tell else None,
            finish_reason=to_openai_finish_reason(self._last, len(calls)),
            stop_reason=self._last.stop_reason,
            token_ids=self._tokens if tell_ids else msgspec.UNSET,
        )


class ChatChoiceEvents:
    """One choice, event by event."""

    def __init__(
        self,
        index: int,
        maker: OutputParserBuilder,
        request: str,
        tokenizer: TokenizerLike,
        *,
        tell_ids: bool,
    ) -> None:
        self._index = index
        self._reader = maker() if maker is not None else None
        self._request = request
        self._words = tokenizer
        self._tell_ids = tell_ids
        self._begun = False
        self._calls = 0
        self._head = b'{"index":%d,"delta":' % index
        self._around: tuple[bytes, bytes] | None = None
        """What stands around the text in most events."""

    def encode_events(
        self, output: RequestOutput, frame: ChunkTemplate, usage: TokenCounter
    ) -> bytes:
        """Return a piece as events; nothing where it has nothing to show."""
        plain = (
            self._reader is None and self._begun and not self._tell_ids and frame.has_constant_usage
        )
        if plain and output.finish_reason is None and not output.logprobs:
            if not output.text:
                return b""
            if self._around is None:
                after = b'},"logprobs":null,"finish_reason":null}'
                self._around = frame.split_at_text(self._head + b'{"content":', after)
            before, end = self._around
            return before + encode(output.text) + end
        # The first event says who speaks, and none of the tokens yet.
        silent = 0 if self._begun else 1
        return b"".join(
            [
                frame.encode_chunk(choice, usage, len(output.token_ids) if at < silent else 0)
                for at, choice in enumerate(self._choices(output))
            ]
        )

    def _choices(self, output: RequestOutput) -> list[bytes]:
        """Return the choices of the events that a piece makes."""
        deltas = []
        if not self._begun:
            self._begun = True
            deltas.append(b'{"role":"assistant","content":""}')
        if self._reader is None:
            if output.text:
                deltas.append(b'{"content":%b}' % encode(output.text))
        else:
            heard = list(self._reader.feed(output.text)) if output.text else []
            heard += self._reader.flush() if output.finish_reason is not None else []
            deltas += [encode(self._delta(one)) for one in heard]
        more = self._more(output)
        if more and not deltas:
            deltas.append(b"{}")
        last = len(deltas) - 1
        events = [
            b'%b%b%b,"finish_reason":null}'
            % (self._head, delta, more if at == last and more else b',"logprobs":null')
            for at, delta in enumerate(deltas)
        ]
        if output.finish_reason is not None:
            events.append(
                b'%b{},"logprobs":null,"finish_reason":"%b","stop_reason":%b}'
                % (
                    self._head,
                    to_openai_finish_reason(output, self._calls).encode(),
                    encode(output.stop_reason),
                )
            )
        return events

    def _more(self, output: RequestOutput) -> bytes:
        """Return what is told beside the delta: how likely tokens were, and which they are."""
        more = b""
        if output.logprobs:
            more = b',"logprobs":%b' % encode(format_chat_logprobs(output.logprobs, self._words))
        if self._tell_ids and output.token_ids:
            more = (more or b',"logprobs":null') + b',"token_ids":%b' % encode(output.token_ids)
        return more

    def _delta(self, heard: OutputDelta) -> dict[str, Any]:
        if heard.tool_index is None:
            delta: dict[str, Any] = {}
            if heard.content:
                delta["content"] = heard.content
            if heard.reasoning:
                delta["reasoning_content"] = heard.reasoning
            return delta
        function = {"arguments": heard.arguments}
        told: dict[str, Any] = {"index": heard.tool_index, "function": function}
        if heard.name:
            self._calls += 1
            function["name"] = heard.name
            told["id"] = format_tool_call_id(self._request, self._index, heard.tool_index)
            told["type"] = "function"
        return {"tool_calls": [told]}
