"""`/v1/chat/completions`: messages answered."""

from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.run.serve.output.output_delta import OutputDelta, OutputParser
from meshwright.run.serve.request import RequestOutput
from meshwright.run.serve.server.admission import RequestContext
from meshwright.run.serve.server.app_state import AppState, ResponseBody
from meshwright.run.serve.server.input_processing.prepared_request import PreparedChat
from meshwright.run.serve.server.openai.choice_stream import ChoiceStream
from meshwright.run.serve.server.protocol.logprobs_format import (
    encode_chat_logprobs,
    format_chat_logprobs,
    join_chat_logprobs,
)
from meshwright.run.serve.server.protocol.response_schema import (
    ChatCompletionResponse,
    ChatResponseChoice,
    ChatResponseMessage,
    OpenAIFinishReason,
    ResponseFunctionCall,
    ResponseToolCall,
)
from meshwright.run.serve.server.sse import ChunkTemplate, TokenCounter, encode
from meshwright.run.serve.tokenizer.tokenizer_like import TokenizerLike


async def create_chat_completion(
    app_state: AppState, prepared: PreparedChat, context: RequestContext
) -> ResponseBody:
    """Answer a chat."""
    (request,) = prepared.requests
    parsers = app_state.output_parsers
    maker = parsers.parser_builder(
        prepared.tools, request.prompt_token_ids, constrained=prepared.constrained
    )
    shown = parsers.visible_special_tokens(prepared.tools)
    request = msgspec.structs.replace(request, visible_special_tokens=shown)
    context.field_names = prepared.field_names
    replies = await app_state.submit([request], context)
    ids, choices = prepared.return_token_ids, range(request.sampling_params.n)
    name = f"chatcmpl-{context.request_id}"
    if prepared.stream:
        frame = ChunkTemplate(
            name,
            "chat.completion.chunk",
            app_state.current_time_s(),
            prepared.model,
            prepared.usage,
        )
        said = [
            ChatChoiceEvents(at, maker, context.request_id, app_state.tokenizer, tell_ids=ids)
            for at in choices
        ]
        return ChoiceStream(replies, said, frame)
    whole = [
        ChatChoiceCollector(
            at, maker, context.request_id, app_state.tokenizer if prepared.logprobs else None
        )
        for at in choices
    ]
    while pieces := (await replies.next_outputs())[1]:
        for piece in pieces:
            whole[piece.index].add(piece)
    return encode(
        ChatCompletionResponse(
            id=name,
            created=app_state.current_time_s(),
            model=prepared.model,
            choices=[choice.build_choice(tell_ids=ids) for choice in whole],
            usage=replies.build_usage(),
            prompt_token_ids=list(request.prompt_token_ids) if ids else msgspec.UNSET,
        )
    )


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

    def __init__(
        self,
        index: int,
        maker: OutputParserBuilder,
        request: str,
        tokenizer: TokenizerLike | None,
    ) -> None:
        """Collect a choice; with a `tokenizer`, its logprobs too."""
        self._index = index
        self._reader = maker() if maker is not None else None
        self._request = request
        self._tokenizer = tokenizer
        self._heard: list[OutputDelta] = []
        self._last = RequestOutput()
        self._logprobs: list[bytes] = []
        """JSON of them, written as they come: all at once would hold others up at the end."""
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
        if output.logprobs and self._tokenizer is not None:
            self._logprobs.append(encode_chat_logprobs(output.logprobs, self._tokenizer))
        self._tokens.extend(output.token_ids)

    def build_choice(self, *, tell_ids: bool) -> ChatResponseChoice:
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
            logprobs=None if self._tokenizer is None else join_chat_logprobs(self._logprobs),
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

    async def format_prompt(self, output: RequestOutput) -> None:
        """Do nothing: chats tell nothing of their prompts."""

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
