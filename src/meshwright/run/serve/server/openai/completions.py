"""`/v1/completions`: prompts continued."""

from collections.abc import Sequence

import msgspec

from meshwright.run.serve.request import RequestOutput, TokenLogprob
from meshwright.run.serve.server.admission import RequestContext
from meshwright.run.serve.server.api_errors import ApiError, invalid_request
from meshwright.run.serve.server.app_state import AppState, ResponseBody
from meshwright.run.serve.server.openai.choice_stream import ChoiceStream
from meshwright.run.serve.server.protocol.logprobs_format import (
    TextOffsets,
    format_completion_logprobs,
    format_token,
    merge_completion_logprobs,
)
from meshwright.run.serve.server.protocol.request_conversion import (
    build_requests,
    build_sampling_params,
    build_structured_outputs,
    encode_prompts,
    get_request_field_names,
    resolve_lora,
    resolve_model,
)
from meshwright.run.serve.server.protocol.request_schema import CompletionRequest
from meshwright.run.serve.server.protocol.response_schema import (
    CompletionLogprobs,
    CompletionResponse,
    CompletionResponseChoice,
    OpenAIFinishReason,
)
from meshwright.run.serve.server.request_tracker import RequestTrackerGroup
from meshwright.run.serve.server.sse import ChunkTemplate, TokenCounter, encode

DEFAULT_MAX_TOKENS = 16
"""The API's own default."""


async def create_completion(
    app_state: AppState, body: CompletionRequest, context: RequestContext
) -> ResponseBody:
    """Answer a request for completions."""
    settings = app_state.config
    model = resolve_model(body.model, settings)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid_request("`best_of` greater than `n` is not supported.", "best_of")
    if body.suffix:
        raise invalid_request("`suffix` is not supported.", "suffix")
    most = body.max_tokens
    if most == 0 and not body.echo:
        raise invalid_request("`max_tokens` is 0, which only `echo` has a use for", "max_tokens")
    sampling = build_sampling_params(
        body,
        settings,
        app_state.tokenizer,
        # The engine has no answer of no tokens; the one that comes is left out below.
        max_tokens=None if most is None else max(most, 1),
        logprobs=body.logprobs,
        grammar=build_structured_outputs(body, body.response_format),
    )
    prompts = await encode_prompts(
        body.prompt,
        app_state.tokenizer,
        param="prompt",
        most=settings.max_prompts_per_request,
        special=body.add_special_tokens is not False,
    )
    asks = build_requests(
        prompts,
        sampling,
        body,
        length=app_state.engine.max_model_len,
        settings=settings,
        tenant=context.tenant,
        adapter=resolve_lora(model, settings),
        prompt_logprobs=body.logprobs if body.echo else None,
        default=DEFAULT_MAX_TOKENS,
    )
    context.field_names = get_request_field_names(body)
    replies = app_state.submit(asks, context)
    replies.hide_output = most == 0
    texts = [
        CompletionChoiceEvents(
            app_state,
            body,
            ask.prompt_token_ids,
            at * ask.sampling_params.n + choice,
            silent=most == 0,
            written=_written(body.prompt, at),
        )
        for at, ask in enumerate(asks)
        for choice in range(ask.sampling_params.n)
    ]
    name = f"cmpl-{context.request_id}"
    if not body.stream:
        choices = await _whole(replies, texts)
        return encode(
            CompletionResponse(
                id=name,
                created=app_state.current_time_s(),
                model=model,
                choices=choices,
                usage=replies.build_usage(),
            )
        )
    frame = ChunkTemplate(
        name,
        "text_completion",
        app_state.current_time_s(),
        model,
        app_state.usage_reporting(body.stream_options),
    )
    return ChoiceStream(replies, texts, frame)


async def _whole(
    replies: RequestTrackerGroup, texts: "Sequence[CompletionChoiceEvents]"
) -> list[CompletionResponseChoice]:
    parts: list[list[CompletionResponseChoice]] = [[] for _ in texts]
    while True:
        base, pieces = await replies.next_outputs()
        if not pieces:
            return [_joined(each) for each in parts]
        for piece in pieces:
            at = base + piece.index
            parts[at].append(texts[at].build_choice(piece))


def _joined(parts: list[CompletionResponseChoice]) -> CompletionResponseChoice:
    """Return the parts of a choice as one."""
    told = [part.logprobs for part in parts if part.logprobs is not None]
    ids = [one for part in parts if isinstance(part.token_ids, list) for one in part.token_ids]
    return msgspec.structs.replace(
        parts[-1],
        text="".join(part.text for part in parts),
        logprobs=merge_completion_logprobs(told) if told else None,
        token_ids=ids if isinstance(parts[0].token_ids, list) else msgspec.UNSET,
        prompt_token_ids=parts[0].prompt_token_ids,
    )


def _written(given: str | list[str | int | list[int]], at: int) -> str | None:
    """Return a prompt as it was written; None where it came as tokens."""
    one = given if isinstance(given, str) else given[at]
    return one if isinstance(one, str) else None


class CompletionChoiceEvents:
    """One choice, piece by piece."""

    def __init__(
        self,
        app_state: AppState,
        body: CompletionRequest,
        prompt: tuple[int, ...],
        index: int,
        *,
        silent: bool,
        written: str | None = None,
    ) -> None:
        """Follow a choice; `written` is the text of its prompt, where it came as one."""
        self._words = app_state.tokenizer
        self._prompt, self._written = prompt, written
        self._index = index
        self._most = body.logprobs
        self._echo = bool(body.echo)
        self._tell_ids = bool(body.return_token_ids)
        self._silent = silent
        self._begun = False
        self._offsets = TextOffsets()
        self._around: tuple[bytes, bytes] | None = None
        """What stands around the text in most events."""
        self._plain = self._most is None and not self._tell_ids and not silent

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
            told = [self._echoed(output.prompt_logprobs)] if self._echo and not self._begun else []
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

    def _echoed(self, told: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """Return what is known of the prompt's tokens; nobody can say it of the first."""
        if len(told) != len(self._prompt) - 1:
            what = "Prompt logprobs are not supported by this engine."
            raise ApiError(501, what, param="logprobs")
        words, text, offsets, begins = self._words, self._opening, self._offsets, list[int]()
        for token in self._prompt:
            begins.append(offsets.offset)
            spelled = words.token_bytes(token)
            if token in words.special_token_ids and not text.startswith(
                spelled.decode(), offsets.offset
            ):
                spelled = b""  # the tokenizer's own, which nobody wrote
            offsets.add(spelled)
        opening = CompletionLogprobs([format_token(self._prompt[0], words)], [None], [None], [0])
        rest = format_completion_logprobs(told, words, offsets=begins[1:], most=self._most or 0)
        return merge_completion_logprobs([opening, rest])
