"""What is asked of an engine, and what it answers: plain values, no torch.

A `Request` goes in, `RequestOutput`s come out until each of its choices has a `finish_reason`.
"""

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from meshwright.run.serve.kv_transfer.handle import KVTransferHandle
from meshwright.run.serve.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    prompt_token_ids: tuple[int, ...]
    sampling_params: SamplingParams = SamplingParams()
    priority: int = 0
    """Higher goes first."""
    tenant: str = ""
    """Who asks: tenants that ask at the same time get equal shares."""
    lora_name: str | None = None
    """The LoRA adapter to answer with."""
    prompt_logprobs: int | None = None
    visible_special_tokens: tuple[str, ...] = ()
    """Special tokens that the text shows all the same, such as the marks around tool calls."""
    do_remote_decode: bool = False
    """Compute the prompt and draw one token; its only piece says where keys and values lie."""
    remote_kv: KVTransferHandle | None = None
    """Keys and values of the prompt that another engine computed, and the token it drew."""
    routing_group: int | None = None
    """Asks of one number begin alike, and are best answered by one engine."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """How likely a token was, and which others were likely in its place."""

    token_id: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one choice of an answer."""

    index: int = 0
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """What can be shown: held back while a character or a stop text may still be unfinished."""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    """Set on the last piece of a choice."""
    stop_reason: str | int | None = None
    """The text or the token that ended it, where one was asked for."""
    error: str = ""
    """Why, where it ended by an error."""
    is_request_error: bool = False
    """Whether that is an error of the request, such as a grammar that cannot be followed."""
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed anew; on the first piece."""
    queue_s: float | None = None
    """Seconds that the ask waited for a place in the engine; on the first piece, where known."""
    kv_handle: KVTransferHandle | None = None
    """Where keys and values of the prompt lie, of an ask that hands them over."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """How likely the prompt's tokens after its first were; on the first piece, where asked for."""


OutputSink = Callable[[RequestOutput], None]


def merge_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Return the pieces of one choice as a single one."""
    if len(outputs) == 1:
        return outputs[0]
    first, last = outputs[0], outputs[-1]
    return msgspec.structs.replace(
        last,
        token_ids=tuple(token for piece in outputs for token in piece.token_ids),
        text="".join(piece.text for piece in outputs),
        logprobs=tuple(told for piece in outputs for told in piece.logprobs),
        cached_tokens=first.cached_tokens,
        queue_s=first.queue_s,
        prompt_logprobs=first.prompt_logprobs,
    )
