"""What is asked of an engine, and what it answers: plain values, no torch.

An `Ask` goes in, `Piece`s come out until each of its choices has a `finish`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import msgspec

from meshwright.run.serve.parcels import Parcel
from meshwright.spec.bounds import real, require, whole

Finish = Literal["stop", "length", "cancelled", "error"]
GrammarKind = Literal["json_schema", "json_object", "regex", "grammar", "choice"]


class Grammar(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must look like."""

    kind: GrammarKind
    text: str = ""
    """The JSON schema, the regular expression, the EBNF grammar, or the choices as a JSON list."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen, and when an answer ends."""

    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    top_k: int = 0
    """0 leaves all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """The same seed and prompt draw the same tokens, whatever runs beside them."""
    logprobs: int | None = None
    """How many of the likeliest tokens to tell beside each one; 0 tells the token's own alone."""
    max_tokens: int | None = None
    """None goes on until the model's context is full."""
    min_tokens: int = 0
    """No end of text and no stop before so many."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer; they are no part of it."""
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    """Answers to the same prompt."""
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        require(
            real("temperature", self.temperature, 0, 100),
            real("top_p", self.top_p, 1e-9, 1),
            whole("top_k", self.top_k, least=0),
            real("min_p", self.min_p, 0, 1),
            real("repetition_penalty", self.repetition_penalty, 1e-3, 100),
            real("presence_penalty", self.presence_penalty, -2, 2),
            real("frequency_penalty", self.frequency_penalty, -2, 2),
            whole("n", self.n, most=128),
            whole("min_tokens", self.min_tokens, least=0),
            [] if self.max_tokens is None else whole("max_tokens", self.max_tokens),
            [] if self.logprobs is None else whole("logprobs", self.logprobs, least=0, most=20),
        )


GREEDY = Sampling(temperature=0.0)


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One request."""

    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    priority: int = 0
    """Higher goes first."""
    tenant: str = ""
    """Who asks: tenants that ask at the same time get equal shares."""
    adapter: str | None = None
    """The LoRA adapter to answer with."""
    prompt_logprobs: int | None = None
    shown: tuple[str, ...] = ()
    """Special tokens that the text shows all the same, such as the marks around tool calls."""
    hands_over: bool = False
    """Compute the prompt and draw one token; its only piece says where keys and values lie."""
    brought: Parcel | None = None
    """Keys and values of the prompt that another engine computed, and the token it drew."""
    near: int | None = None
    """Asks of one number begin alike, and are best answered by one engine."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """How likely a token was, and which others were likely in its place."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Piece(msgspec.Struct, frozen=True, kw_only=True):
    """What one step added to one choice of an answer."""

    choice: int = 0
    tokens: tuple[int, ...] = ()
    text: str = ""
    """What can be shown: held back while a character or a stop text may still be unfinished."""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    """Set on the last piece of a choice."""
    stopped_by: str | int | None = None
    """The text or the token that ended it, where one was asked for."""
    error: str = ""
    """Why, where it ended by an error."""
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed anew; on the first piece."""
    queued_s: float | None = None
    """Seconds that the ask waited for a place in the engine; on the first piece, where known."""
    parcel: Parcel | None = None
    """Where keys and values of the prompt lie, of an ask that hands them over."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """How likely the prompt's tokens after its first were; on the first piece, where asked for."""


Sink = Callable[[Piece], None]


def joined(pieces: Sequence[Piece]) -> Piece:
    """Return the pieces of one choice as a single one."""
    if len(pieces) == 1:
        return pieces[0]
    first, last = pieces[0], pieces[-1]
    return msgspec.structs.replace(
        last,
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        text="".join(piece.text for piece in pieces),
        logprobs=tuple(told for piece in pieces for told in piece.logprobs),
        cached_tokens=first.cached_tokens,
        queued_s=first.queued_s,
        prompt_logprobs=first.prompt_logprobs,
    )


class Gauges(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine does at this moment, and what it did since it began."""

    engines: int = 1
    """How many there are, behind a router."""
    well: int | None = None
    """Those of them that make progress; None where it is one, which says so itself."""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of the blocks that requests hold."""
    prompt_tokens: int = 0
    """Tokens of prompts whose answers began, those found in the cache included."""
    output_tokens: int = 0
    prefix_queries: int = 0
    """Tokens of prompts that were looked up in the prefix cache."""
    prefix_hits: int = 0
    """Those of them that were found."""
    preemptions: int = 0
    steps: int = 0
    step_sizes: tuple[int, ...] = ()
    """Steps by their tokens: up to each of `STEP_SIZES`, and beyond."""
    step_tokens: int = 0
    drafts: int = 0
    """Guesses ahead that were checked, their tokens, and those of them that were right."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    idle_s: float | None = None
    """Seconds since the last step ended while requests are there; None where none are."""
    blocks: int = 0
    """Blocks of keys and values that there are; 0 where no engine is there to have any."""
    block_tokens: int = 0
    prefix_cache: bool = False
    running_adapters: tuple[str, ...] = ()
    """LoRA adapters of requests that have a place, and of those that wait for one."""
    waiting_adapters: tuple[str, ...] = ()
    more: dict[str, Any] = {}

    def after(self, before: "Gauges") -> "Gauges":
        """Return the same with what was counted before; what is done at the moment stays."""
        return msgspec.structs.replace(self, **counted((self, before)))


STEP_SIZES = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens of a step that are told apart: the bounds that vLLM's figures have."""
COUNTED = (
    *("prompt_tokens", "output_tokens", "prefix_queries", "prefix_hits", "preemptions"),
    *("steps", "step_tokens", "drafts", "draft_tokens", "accepted_tokens"),
)
"""Gauges that only grow."""


def counted(gauges: Iterable[Gauges]) -> dict[str, Any]:
    """Return what several gauges have counted, as one has it."""
    every = tuple(gauges)
    found: dict[str, Any] = {name: sum(getattr(one, name) for one in every) for name in COUNTED}
    sizes = [one.step_sizes for one in every if one.step_sizes]
    found["step_sizes"] = tuple(map(sum, zip(*sizes, strict=True)))
    return found
