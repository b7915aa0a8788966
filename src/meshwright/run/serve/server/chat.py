"""`/v1/chat/completions`: messages answered."""

from collections.abc import Callable
from typing import Any

import msgspec

from meshwright.run.serve.asked import Piece, TokenLogprob
from meshwright.run.serve.sampling.heard import Heard, Reader
from meshwright.run.serve.server.asking import (
    adapter_of,
    asks_of,
    fields_of,
    grammar_of,
    messages_of,
    named_model,
    own_values,
    sampling_of,
)
from meshwright.run.serve.server.bodies import ChatBody
from meshwright.run.serve.server.choices import ChoiceStream
from meshwright.run.serve.server.desk import Answer, Desk
from meshwright.run.serve.server.faults import refused
from meshwright.run.serve.server.likely import chat_logprobs
from meshwright.run.serve.server.replies import (
    CalledFunction,
    CalledTool,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    FinishReason,
)
from meshwright.run.serve.server.streams import Counts, Frame, encode
from meshwright.run.serve.server.tools import tools_of
from meshwright.run.serve.server.traffic import Call
from meshwright.run.serve.server.words import Words, written_chat


async def chat(desk: Desk, body: ChatBody, call: Call) -> Answer:
    """Answer a chat."""
    settings = desk.settings
    model = named_model(body.model, settings)
    if body.max_tokens and body.max_completion_tokens not in (None, body.max_tokens):
        raise refused("`max_tokens` and `max_completion_tokens` differ: give one", "max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise refused("`top_logprobs` needs `logprobs` to be true", "top_logprobs")
    tools = tools_of(body)
    grammar = grammar_of(body, body.response_format)
    if grammar is not None and tools.grammar is not None:
        raise refused("`tool_choice` demands a call, which excludes another form", "tool_choice")
    sampling = sampling_of(
        body,
        settings,
        desk.words,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar or tools.grammar,
    )
    prompt = await written_chat(
        desk.words,
        messages_of(body.messages),
        tools.shown,
        template_values(body),
        goes_on=bool(body.continue_final_message),
    )
    maker = desk.readers.maker(tools, prompt, constrained=grammar is not None)
    (ask,) = asks_of(
        [prompt],
        sampling,
        body,
        length=desk.engine.max_length,
        settings=settings,
        tenant=call.tenant,
        adapter=adapter_of(model, settings),
        shown=desk.readers.marks(tools),
    )
    call.fields = fields_of(body)
    replies = desk.ask([ask], call)
    told = bool(body.logprobs)
    ids = bool(body.return_token_ids)
    name = f"chatcmpl-{call.name}"
    if body.stream:
        frame = Frame(
            name, "chat.completion.chunk", desk.now(), model, desk.tell_usage(body.stream_options)
        )
        said = [
            ChoiceEvents(at, maker, call.name, desk.words, tell_ids=ids) for at in range(sampling.n)
        ]
        return ChoiceStream(replies, said, frame)
    whole = [ChoiceWhole(at, maker, call.name) for at in range(sampling.n)]
    while pieces := (await replies.some())[1]:
        for piece in pieces:
            whole[piece.choice].add(piece)
    return encode(
        ChatCompletion(
            id=name,
            created=desk.now(),
            model=model,
            choices=[one.choice(desk.words, tell=told, tell_ids=ids) for one in whole],
            usage=replies.usage(),
            prompt_token_ids=list(prompt) if ids else msgspec.UNSET,
        )
    )


def template_values(body: ChatBody) -> dict[str, Any]:
    """Return what the template is given beside messages and tools."""
    begins = body.add_generation_prompt
    if begins and body.continue_final_message:
        what = "`continue_final_message` goes on with an answer, and `add_generation_prompt` begins"
        raise refused(f"{what} one: give one of both", "continue_final_message")
    values: dict[str, Any] = {
        "add_generation_prompt": not body.continue_final_message if begins is None else begins
    }
    if body.reasoning_effort is not None:
        values["reasoning_effort"] = body.reasoning_effort
    return {**values, **own_values(body.chat_template_kwargs)}


Maker = Callable[[], Reader] | None
"""Makes the reader of one choice; None where all is content."""


def call_id(request: str, choice: int, call: int) -> str:
    """Return the name of a tool call."""
    return f"call_{request}_{choice}_{call}"


def finish_of(piece: Piece, calls: int) -> FinishReason:
    """Return how a choice ended."""
    if piece.finish == "length":
        return "length"
    return "tool_calls" if calls else "stop"


class ChoiceWhole:
    """One choice that is told at its end."""

    def __init__(self, index: int, maker: Maker, request: str) -> None:
        self._index = index
        self._reader = maker() if maker is not None else None
        self._request = request
        self._heard: list[Heard] = []
        self._last = Piece()
        self._logprobs: list[TokenLogprob] = []
        self._tokens: list[int] = []

    def add(self, piece: Piece) -> None:
        """Add a piece."""
        if piece.text:
            self._heard += self._reader.feed(piece.text) if self._reader else [Heard(piece.text)]
        if piece.finish is not None:
            self._heard += self._reader.end() if self._reader else []
            self._last = piece
        self._logprobs.extend(piece.logprobs)
        self._tokens.extend(piece.tokens)

    def choice(self, words: Words, *, tell: bool, tell_ids: bool) -> ChatChoice:
        """Return it as a whole."""
        content = "".join(heard.content for heard in self._heard)
        thoughts = "".join(heard.reasoning for heard in self._heard)
        calls: dict[int, list[str]] = {}
        for heard in self._heard:
            if heard.call is not None:
                named = calls.setdefault(heard.call, ["", ""])
                named[0] += heard.name
                named[1] += heard.arguments
        message = ChatMessage(
            content=None if calls and not content else content,
            reasoning_content=thoughts or msgspec.UNSET,
            tool_calls=[
                CalledTool(
                    id=call_id(self._request, self._index, at), function=CalledFunction(*named)
                )
                for at, named in calls.items()
            ]
            or msgspec.UNSET,
        )
        return ChatChoice(
            index=self._index,
            message=message,
            logprobs=chat_logprobs(self._logprobs, words) if tell else None,
            finish_reason=finish_of(self._last, len(calls)),
            stop_reason=self._last.stopped_by,
            token_ids=self._tokens if tell_ids else msgspec.UNSET,
        )


class ChoiceEvents:
    """One choice, event by event."""

    def __init__(
        self, index: int, maker: Maker, request: str, words: Words, *, tell_ids: bool
    ) -> None:
        self._index = index
        self._reader = maker() if maker is not None else None
        self._request = request
        self._words = words
        self._tell_ids = tell_ids
        self._begun = False
        self._calls = 0
        self._head = b'{"index":%d,"delta":' % index
        self._around: tuple[bytes, bytes] | None = None
        """What stands around the text in most events."""

    def event(self, piece: Piece, frame: Frame, usage: Counts) -> bytes:
        """Return a piece as events; nothing where it has nothing to show."""
        plain = self._reader is None and self._begun and not self._tell_ids and frame.steady
        if plain and piece.finish is None and not piece.logprobs:
            if not piece.text:
                return b""
            if self._around is None:
                after = b'},"logprobs":null,"finish_reason":null}'
                self._around = frame.around(self._head + b'{"content":', after)
            before, end = self._around
            return before + encode(piece.text) + end
        # The first event says who speaks, and none of the tokens yet.
        silent = 0 if self._begun else 1
        return b"".join(
            [
                frame.event(choice, usage, len(piece.tokens) if at < silent else 0)
                for at, choice in enumerate(self._choices(piece))
            ]
        )

    def _choices(self, piece: Piece) -> list[bytes]:
        """Return the choices of the events that a piece makes."""
        deltas = []
        if not self._begun:
            self._begun = True
            deltas.append(b'{"role":"assistant","content":""}')
        if self._reader is None:
            if piece.text:
                deltas.append(b'{"content":%b}' % encode(piece.text))
        else:
            heard = list(self._reader.feed(piece.text)) if piece.text else []
            heard += self._reader.end() if piece.finish is not None else []
            deltas += [encode(self._delta(one)) for one in heard]
        more = self._more(piece)
        if more and not deltas:
            deltas.append(b"{}")
        last = len(deltas) - 1
        events = [
            b'%b%b%b,"finish_reason":null}'
            % (self._head, delta, more if at == last and more else b',"logprobs":null')
            for at, delta in enumerate(deltas)
        ]
        if piece.finish is not None:
            events.append(
                b'%b{},"logprobs":null,"finish_reason":"%b","stop_reason":%b}'
                % (
                    self._head,
                    finish_of(piece, self._calls).encode(),
                    encode(piece.stopped_by),
                )
            )
        return events

    def _more(self, piece: Piece) -> bytes:
        """Return what is told beside the delta: how likely tokens were, and which they are."""
        more = b""
        if piece.logprobs:
            more = b',"logprobs":%b' % encode(chat_logprobs(piece.logprobs, self._words))
        if self._tell_ids and piece.tokens:
            more = (more or b',"logprobs":null') + b',"token_ids":%b' % encode(piece.tokens)
        return more

    def _delta(self, heard: Heard) -> dict[str, Any]:
        if heard.call is None:
            delta: dict[str, Any] = {}
            if heard.content:
                delta["content"] = heard.content
            if heard.reasoning:
                delta["reasoning_content"] = heard.reasoning
            return delta
        function = {"arguments": heard.arguments}
        told: dict[str, Any] = {"index": heard.call, "function": function}
        if heard.name:
            self._calls += 1
            function["name"] = heard.name
            told["id"] = call_id(self._request, self._index, heard.call)
            told["type"] = "function"
        return {"tool_calls": [told]}
