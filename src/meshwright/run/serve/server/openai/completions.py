"""`/v1/completions`: prompts continued."""

import asyncio
from collections.abc import Sequence

import msgspec

from meshwright.run.serve.request import RequestOutput, TokenLogprob
from meshwright.run.serve.server.admission import RequestContext
from meshwright.run.serve.server.api_errors import ApiError
from meshwright.run.serve.server.app_state import AppState, ResponseBody
from meshwright.run.serve.server.input_processing.prepared_request import PreparedCompletion
from meshwright.run.serve.server.openai.choice_stream import ChoiceStream
from meshwright.run.serve.server.protocol.logprobs_format import (
    CompletionLogprobsWriter,
    TextOffsets,
    format_completion_logprobs,
    format_token,
    merge_completion_logprobs,
)
from meshwright.run.serve.server.protocol.response_schema import (
    CompletionLogprobs,
    CompletionResponse,
    CompletionResponseChoice,
    OpenAIFinishReason,
)
from meshwright.run.serve.server.request_tracker import RequestTrackerGroup
from meshwright.run.serve.server.sse import ChunkTemplate, TokenCounter, encode
from meshwright.run.serve.tokenizer.tokenizer_like import TokenizerLike

PROMPT_PART_TOKENS = 256
"""Tokens of a prompt whose log-probabilities are written at a time; streams go on in between."""


async def create_completion(
    app_state: AppState, prepared: PreparedCompletion, context: RequestContext
) -> ResponseBody:
    """Answer a request for completions."""
    requests = prepared.requests
    context.field_names = prepared.field_names
    replies = await app_state.submit(requests, context)
    replies.hide_output = prepared.hide_output
    choices = [
        CompletionChoiceEvents(
            app_state.tokenizer,
            prepared,
            request.prompt_token_ids,
            at * request.sampling_params.n + choice,
            text=prepared.texts[at] if prepared.echo else None,
        )
        for at, request in enumerate(requests)
        for choice in range(request.sampling_params.n)
    ]
    name = f"cmpl-{context.request_id}"
    if not prepared.stream:
        return encode(
            CompletionResponse(
                id=name,
                created=app_state.current_time_s(),
                model=prepared.model,
                choices=await _collect(replies, choices),
                usage=replies.build_usage(),
            )
        )
    frame = ChunkTemplate(
        name, "text_completion", app_state.current_time_s(), prepared.model, prepared.usage
    )
    return ChoiceStream(replies, choices, frame)


async def _collect(
    replies: RequestTrackerGroup, choices: "Sequence[CompletionChoiceEvents]"
) -> list[CompletionResponseChoice]:
    parts: list[list[CompletionResponseChoice]] = [[] for _ in choices]
    logprobs = [CompletionLogprobsWriter() for _ in choices]
    while True:
        base, pieces = await replies.next_outputs()
        if not pieces:
            joined = zip(parts, logprobs, strict=True)
            return [_joined(told, written.join()) for told, written in joined]
        for piece in pieces:
            at = base + piece.index
            if piece.prompt_logprobs:
                await choices[at].format_prompt(piece)
            part = choices[at].build_choice(piece)
            if part.logprobs is not None:
                logprobs[at].add(part.logprobs)
                part = msgspec.structs.replace(part, logprobs=None)
            parts[at].append(part)


def _joined(
    parts: list[CompletionResponseChoice], logprobs: CompletionLogprobs | None
) -> CompletionResponseChoice:
    """Return the parts of a choice as one."""
    ids = [token for part in parts if isinstance(part.token_ids, list) for token in part.token_ids]
    return msgspec.structs.replace(
        parts[-1],
        text="".join(part.text for part in parts),
        logprobs=logprobs,
        token_ids=ids if isinstance(parts[0].token_ids, list) else msgspec.UNSET,
        prompt_token_ids=parts[0].prompt_token_ids,
    )


class CompletionChoiceEvents:
    """One choice, piece by piece."""

    def __init__(
        self,
        tokenizer: TokenizerLike,
        prepared: PreparedCompletion,
        prompt: tuple[int, ...],
        index: int,
        *,
        text: str | None = None,
    ) -> None:
        """Follow a choice; `text` is that of its prompt, where it was given as one."""
        self._words = tokenizer
        self._prompt, self._written = prompt, text
        self._index = index
        self._most = prepared.logprobs
        self._echo = prepared.echo
        self._tell_ids = prepared.return_token_ids
        self._silent = prepared.hide_output
        self._echoed: CompletionLogprobs | None = None
        self._begun = False
        self._offsets = TextOffsets()
        self._around: tuple[bytes, bytes] | None = None
        """What stands around the text in most events."""
        self._plain = self._most is None and not self._tell_ids and not self._silent

    def encode_events(
        self, output: RequestOutput, frame: ChunkTemplate, usage: TokenCounter
    ) -> bytes:
        """Return a piece as an event; nothing where it has nothing to show."""
        if (
            self._plain
            and self._begun
            and output.finish_reason is None
            and frame.has_constant_usage
        ):
            if not output.text:
                return b""
            if not self._around:
                head = b'{"index":%d,"text":' % self._index
                self._around = frame.split_at_text(head, b',"logprobs":null,"finish_reason":null}')
            before, after = self._around
            return before + encode(output.text) + after
        part = self.build_choice(output)
        told = part.text or part.finish_reason or part.logprobs or part.token_ids
        return frame.encode_chunk(encode(part), usage) if told else b""

    def build_choice(self, output: RequestOutput) -> CompletionResponseChoice:
        """Return a piece as a part of a choice."""
        silent = self._silent
        text = "" if silent else output.text
        ids: list[int] | msgspec.UnsetType = msgspec.UNSET
        prompt_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
        if self._tell_ids:
            ids = [] if silent else list(output.token_ids)
            prompt_ids = msgspec.UNSET if self._begun else list(self._prompt)
        told = []
        if self._most is not None:
            told = [self._prompt_logprobs()] if self._echo and not self._begun else []
            if output.logprobs and not silent:
                told.append(self._likely(output.logprobs))
        if self._echo and not self._begun:
            text = self._opening + text
        self._begun = True
        finish: OpenAIFinishReason | None = None
        if output.finish_reason is not None:
            finish = "length" if silent or output.finish_reason == "length" else "stop"
        return CompletionResponseChoice(
            index=self._index,
            text=text,
            logprobs=merge_completion_logprobs(told) if told else None,
            finish_reason=finish,
            stop_reason=None if silent else output.stop_reason,
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
            begins.append(offsets.offset)
            offsets.add(
                b""
                if told.token_id in words.special_token_ids
                else words.token_bytes(told.token_id)
            )
        return format_completion_logprobs(tokens, words, offsets=begins, most=self._most or 0)

    async def format_prompt(self, output: RequestOutput) -> None:
        """Write what is known of the prompt's tokens, in parts: streams go on in between."""
        if self._most is None or not self._echo:
            return
        told = output.prompt_logprobs
        parts = [self._first_of_prompt()]
        if len(told) == len(self._prompt) - 1:
            spelled = await self._prompt_offsets()
            for begin in range(0, len(told), PROMPT_PART_TOKENS):
                end = begin + PROMPT_PART_TOKENS
                parts.append(
                    format_completion_logprobs(
                        told[begin:end],
                        self._words,
                        offsets=spelled[begin + 1 : end + 1],
                        most=self._most,
                    )
                )
                await asyncio.sleep(0)
            self._echoed = merge_completion_logprobs(parts)

    def _prompt_logprobs(self) -> CompletionLogprobs:
        if self._echoed is None and len(self._prompt) > 1:
            what = "Prompt logprobs are not supported by this engine."
            raise ApiError(501, what, param="logprobs")
        return self._echoed or self._first_of_prompt()

    def _first_of_prompt(self) -> CompletionLogprobs:
        """Return what is known of the first token: nobody can say how likely it was."""
        self._offsets = TextOffsets()
        self._add_of_prompt(self._prompt[0], self._opening)
        return CompletionLogprobs([format_token(self._prompt[0], self._words)], [None], [None], [0])

    async def _prompt_offsets(self) -> list[int]:
        """Return where in the text each token of the prompt begins."""
        self._offsets, text, begins = TextOffsets(), self._opening, list[int]()
        for at, token in enumerate(self._prompt):
            begins.append(self._offsets.offset)
            self._add_of_prompt(token, text)
            if at % PROMPT_PART_TOKENS == PROMPT_PART_TOKENS - 1:
                await asyncio.sleep(0)
        return begins

    def _add_of_prompt(self, token: int, text: str) -> None:
        spelled = self._words.token_bytes(token)
        if token in self._words.special_token_ids and not text.startswith(
            spelled.decode(), self._offsets.offset
        ):
            spelled = b""  # the tokenizer's own, which nobody wrote
        self._offsets.add(spelled)
