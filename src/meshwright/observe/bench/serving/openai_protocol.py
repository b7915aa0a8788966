"""What goes over the wire: the bodies of requests, and the events of a streamed answer."""

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import chain
from typing import Any, Literal

import msgspec

Api = Literal["completions", "chat"]

PATHS: dict[Api, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


class RequestOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What all requests of a bench have in common."""

    model: str
    api: Api = "completions"
    temperature: float = 0.0
    ignore_eos: bool = True
    """Answers go on to the length that was asked for, whatever the model would like."""
    openai_only: bool = False
    """Only fields of OpenAI's own API are sent."""
    return_token_ids: bool = False
    """Ask for the tokens of answers, where a server can give them."""
    extra: dict[str, Any] = {}
    """More fields of every body."""

    def body(self, prompt: list[int] | str, output_tokens: int, seed: int) -> bytes:
        """Return the body of one request."""
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max(1, output_tokens),
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.api == "chat":
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if self.temperature > 0:
            fields["seed"] = seed
        if not self.openai_only:
            # A piece of text does not tell its tokens; servers that know this field do.
            fields["stream_options"]["continuous_usage_stats"] = True
            if self.ignore_eos:
                fields |= {"ignore_eos": True, "min_tokens": max(1, output_tokens)}
            if self.return_token_ids:
                fields["return_token_ids"] = True
        return msgspec.json.encode(fields | self.extra)


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class StreamParser:
    """Gathers the events of one stream; `feed` it what came, with the time at which it did."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.token_counts: list[int] = []
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens = 0
        self.finish_reason = ""
        self.error = ""
        self.is_complete = False
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._rest = b""
        self._counts_on: bool | None = None

    def feed(self, some: bytes, at_s: float) -> None:
        """Take what the connection gave; it may hold parts of events, or several."""
        *lines, self._rest = (self._rest + some).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), at_s)

    def _event(self, data: bytes, at_s: float) -> None:
        if data == b"[DONE]":
            self.is_complete = True
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            self.error = self.error or f"an event that cannot be read: {error}"
            return
        if event.error is not None:
            self.error = self.error or extract_error_message(event.error)
        before = self.output_tokens or 0
        if event.usage is not None:
            self._usage(event.usage)
        if event.choices:
            self._choices(event.choices, before, at_s)

    def _choices(self, choices: list[_Choice], before: int, at_s: float) -> None:
        if self._counts_on is None:
            # A server that tells its count only at the end does not tell the tokens of a piece.
            self._counts_on = self.output_tokens is not None
        text = "".join(part for choice in choices for part in _texts(choice))
        ids = [choice.token_ids for choice in choices if choice.token_ids is not None]
        self.finish_reason = next(
            filter(None, (one.finish_reason for one in choices)), self.finish_reason
        )
        if ids:
            tokens = sum(map(len, ids))
            self._ids += chain.from_iterable(ids)
        elif self._counts_on:
            tokens = (self.output_tokens or 0) - before
        else:
            tokens = 1 if text else 0
        if text:
            self._texts.append(text)
        if tokens > 0:
            self.times_s.append(at_s)
            self.token_counts.append(tokens)

    def _usage(self, usage: _Usage) -> None:
        if usage.prompt_tokens is not None:
            self.prompt_tokens = usage.prompt_tokens
        if usage.completion_tokens is not None:
            self.output_tokens = usage.completion_tokens
        details = usage.prompt_tokens_details
        if details is not None and details.cached_tokens is not None:
            self.cached_tokens = details.cached_tokens

    @property
    def tokens(self) -> int:
        """Tokens of the answer, by the server's count where it gives one."""
        return sum(self.token_counts) if self.output_tokens is None else self.output_tokens

    @property
    def content(self) -> tuple[int, ...] | str:
        """The answer: its tokens where the server gave them, else its text."""
        return tuple(self._ids) if self._ids else "".join(self._texts)

    @property
    def answer_hash(self) -> str:
        """A hash of the answer."""
        return blake2b(msgspec.json.encode(self.content), digest_size=8).hexdigest()


def _texts(choice: _Choice) -> Iterator[str]:
    if choice.text:
        yield choice.text
    if choice.delta is not None:
        delta = choice.delta
        yield from filter(None, (delta.reasoning_content, delta.reasoning, delta.content))
        if delta.tool_calls is not None and bytes(delta.tool_calls) not in (b"null", b"[]"):
            yield bytes(delta.tool_calls).decode(errors="replace")


def extract_error_message(error: object) -> str:
    """Return what an error of a server says, whatever shape it has."""
    if isinstance(error, Mapping):
        inner = error.get("error") or error.get("message") or error.get("detail")
        return extract_error_message(inner) if inner else str(dict(error))
    return str(error)
