"""`/v1/completions`: prompts continued."""

from collections.abc import Sequence

import msgspec

from meshwright.run.serve.asked import Piece, TokenLogprob
from meshwright.run.serve.server.asking import (
    adapter_of,
    asks_of,
    fields_of,
    grammar_of,
    named_model,
    prompts_of,
    sampling_of,
)
from meshwright.run.serve.server.bodies import CompletionBody
from meshwright.run.serve.server.choices import ChoiceStream
from meshwright.run.serve.server.desk import Answer, Desk
from meshwright.run.serve.server.faults import Fault, refused
from meshwright.run.serve.server.likely import Offsets, completion_logprobs, joined, shown
from meshwright.run.serve.server.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    FinishReason,
)
from meshwright.run.serve.server.streams import Counts, Frame, encode
from meshwright.run.serve.server.traffic import Call
from meshwright.run.serve.server.under_way import Replies

DEFAULT_TOKENS = 16
"""The API's own default."""


async def complete(desk: Desk, body: CompletionBody, call: Call) -> Answer:
    """Answer a request for completions."""
    settings = desk.settings
    model = named_model(body.model, settings)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise refused("`best_of` is not offered beyond `n`: leave it out", "best_of")
    if body.suffix:
        raise refused("`suffix` is not offered: leave it out", "suffix")
    most = body.max_tokens
    if most == 0 and not body.echo:
        raise refused("`max_tokens` is 0, which only `echo` has a use for", "max_tokens")
    sampling = sampling_of(
        body,
        settings,
        desk.words,
        # The engine has no answer of no tokens; the one that comes is left out below.
        max_tokens=None if most is None else max(most, 1),
        logprobs=body.logprobs,
        grammar=grammar_of(body, body.response_format),
    )
    prompts = await prompts_of(
        body.prompt,
        desk.words,
        param="prompt",
        most=settings.prompts,
        special=body.add_special_tokens is not False,
    )
    asks = asks_of(
        prompts,
        sampling,
        body,
        length=desk.engine.max_length,
        settings=settings,
        tenant=call.tenant,
        adapter=adapter_of(model, settings),
        prompt_logprobs=body.logprobs if body.echo else None,
        default=DEFAULT_TOKENS,
    )
    call.fields = fields_of(body)
    replies = desk.ask(asks, call)
    replies.silent = most == 0
    texts = [
        CompletionText(
            desk,
            body,
            ask.prompt,
            at * ask.sampling.n + choice,
            silent=most == 0,
            written=_written(body.prompt, at),
        )
        for at, ask in enumerate(asks)
        for choice in range(ask.sampling.n)
    ]
    name = f"cmpl-{call.name}"
    if not body.stream:
        choices = await _whole(replies, texts)
        return encode(
            Completion(
                id=name, created=desk.now(), model=model, choices=choices, usage=replies.usage()
            )
        )
    frame = Frame(name, "text_completion", desk.now(), model, desk.tell_usage(body.stream_options))
    return ChoiceStream(replies, texts, frame)


async def _whole(replies: Replies, texts: "Sequence[CompletionText]") -> list[CompletionChoice]:
    parts: list[list[CompletionChoice]] = [[] for _ in texts]
    while True:
        base, pieces = await replies.some()
        if not pieces:
            return [_joined(each) for each in parts]
        for piece in pieces:
            at = base + piece.choice
            parts[at].append(texts[at].part(piece))


def _joined(parts: list[CompletionChoice]) -> CompletionChoice:
    """Return the parts of a choice as one."""
    told = [part.logprobs for part in parts if part.logprobs is not None]
    ids = [one for part in parts if isinstance(part.token_ids, list) for one in part.token_ids]
    return msgspec.structs.replace(
        parts[-1],
        text="".join(part.text for part in parts),
        logprobs=joined(told) if told else None,
        token_ids=ids if isinstance(parts[0].token_ids, list) else msgspec.UNSET,
        prompt_token_ids=parts[0].prompt_token_ids,
    )


def _written(given: str | list[str | int | list[int]], at: int) -> str | None:
    """Return a prompt as it was written; None where it came as tokens."""
    one = given if isinstance(given, str) else given[at]
    return one if isinstance(one, str) else None


class CompletionText:
    """One choice, piece by piece."""

    def __init__(
        self,
        desk: Desk,
        body: CompletionBody,
        prompt: tuple[int, ...],
        index: int,
        *,
        silent: bool,
        written: str | None = None,
    ) -> None:
        """Follow a choice; `written` is the text of its prompt, where it came as one."""
        self._words = desk.words
        self._prompt, self._written = prompt, written
        self._index = index
        self._most = body.logprobs
        self._echo = bool(body.echo)
        self._tell_ids = bool(body.return_token_ids)
        self._silent = silent
        self._begun = False
        self._offsets = Offsets()
        self._around: tuple[bytes, bytes] | None = None
        """What stands around the text in most events."""
        self._plain = self._most is None and not self._tell_ids and not silent

    def event(self, piece: Piece, frame: Frame, usage: Counts) -> bytes:
        """Return a piece as an event; nothing where it has nothing to show."""
        if self._plain and self._begun and piece.finish is None and frame.steady:
            if not piece.text:
                return b""
            if not self._around:
                head = b'{"index":%d,"text":' % self._index
                self._around = frame.around(head, b',"logprobs":null,"finish_reason":null}')
            before, after = self._around
            return before + encode(piece.text) + after
        part = self.part(piece)
        told = part.text or part.finish_reason or part.logprobs or part.token_ids
        return frame.event(encode(part), usage) if told else b""

    def part(self, piece: Piece) -> CompletionChoice:
        """Return a piece as a part of a choice."""
        silent = self._silent
        text = "" if silent else piece.text
        ids: list[int] | msgspec.UnsetType = msgspec.UNSET
        prompt_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
        if self._tell_ids:
            ids = [] if silent else list(piece.tokens)
            prompt_ids = msgspec.UNSET if self._begun else list(self._prompt)
        told = []
        if self._most is not None:
            told = [self._echoed(piece.prompt_logprobs)] if self._echo and not self._begun else []
            if piece.logprobs and not silent:
                told.append(self._likely(piece.logprobs))
        if self._echo and not self._begun:
            text = self._opening + text
        self._begun = True
        finish: FinishReason | None = None
        if piece.finish is not None:
            finish = "length" if silent or piece.finish == "length" else "stop"
        return CompletionChoice(
            index=self._index,
            text=text,
            logprobs=joined(told) if told else None,
            finish_reason=finish,
            stop_reason=None if silent else piece.stopped_by,
            token_ids=ids,
            prompt_token_ids=prompt_ids,
        )

    @property
    def _opening(self) -> str:
        """The prompt, as it was written where it was."""
        if self._written is not None:
            return self._written
        return self._words.decode(self._prompt, skip_special=False)

    def _likely(self, tokens: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """Return what is told of an answer's tokens, whose text shows no special ones."""
        words, offsets, begins = self._words, self._offsets, list[int]()
        for told in tokens:
            begins.append(offsets.at)
            offsets.add(b"" if told.token in words.marks else words.spelled(told.token))
        return completion_logprobs(tokens, words, offsets=begins, most=self._most or 0)

    def _echoed(self, told: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """Return what is known of the prompt's tokens; nobody can say it of the first."""
        if len(told) != len(self._prompt) - 1:
            raise Fault(501, "This engine does not tell how likely prompts were", param="logprobs")
        words, text, offsets, begins = self._words, self._opening, self._offsets, list[int]()
        for token in self._prompt:
            begins.append(offsets.at)
            spelled = words.spelled(token)
            if token in words.marks and not text.startswith(spelled.decode(), offsets.at):
                spelled = b""  # the tokenizer's own, which nobody wrote
            offsets.add(spelled)
        opening = CompletionLogprobs([shown(self._prompt[0], words)], [None], [None], [0])
        rest = completion_logprobs(told, words, offsets=begins[1:], most=self._most or 0)
        return joined([opening, rest])
