"""`LLM`: answers to many prompts, offline, without a server.

llm = LLM("path/of/model")
llm.generate(["The capital of France is"], Sampling(temperature=0.0, max_tokens=8))
llm.chat([{"role": "user", "content": "Hello"}])
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.policy.ordering import longest_first
from meshwright.run.serve.asked import Ask, Finish, Piece, Sampling, TokenLogprob
from meshwright.run.serve.engine.ranks import SERVED, Ranks
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.engine.start import start_engine
from meshwright.run.serve.model.words import Words
from meshwright.spec.model import Model

Prompt = str | Sequence[int]


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    text: str
    tokens: tuple[int, ...]
    finish: Finish
    logprobs: tuple[TokenLogprob, ...] = ()


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The answers to one prompt."""

    prompt: tuple[int, ...]
    choices: tuple[Choice, ...]
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed anew."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    """How likely the prompt's tokens after its first were, where the ask wants to know."""

    @property
    def text(self) -> str:
        """The first answer."""
        return self.choices[0].text


class _Writing:
    """One choice as far as it has come."""

    __slots__ = ("finish", "logprobs", "text", "tokens")

    def __init__(self) -> None:
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.finish: Finish | None = None

    def choice(self) -> Choice:
        assert self.finish is not None, "an answer that is read has ended"
        return Choice(
            text="".join(self.text),
            tokens=tuple(self.tokens),
            finish=self.finish,
            logprobs=tuple(self.logprobs),
        )


class _Heard:
    """What was heard of one ask; pieces are let go, for thousands of them keep Python busy."""

    def __init__(self, ask: Ask, each: Callable[[Piece], None] | None = None) -> None:
        self._ask, self._each = ask, each
        self._choices = [_Writing() for _ in range(ask.sampling.n)]
        self._first: Piece | None = None

    def __call__(self, piece: Piece) -> None:
        self._first = self._first or piece
        writing = self._choices[piece.choice]
        writing.tokens += piece.tokens
        writing.finish = piece.finish
        if piece.text:
            writing.text.append(piece.text)
        if piece.logprobs:
            writing.logprobs += piece.logprobs
        if self._each is not None:
            self._each(piece)

    def completion(self) -> Completion:
        first = self._first or Piece()
        return Completion(
            prompt=self._ask.prompt,
            choices=tuple(writing.choice() for writing in self._choices),
            cached_tokens=first.cached_tokens,
            prompt_logprobs=first.prompt_logprobs,
        )


class LLM:
    """A model that answers in this process."""

    def __init__(
        self,
        model: str | Path | Model,
        settings: EngineSettings | None = None,
        *,
        ranks: Ranks = SERVED,
        lent: Mapping[str, Tensor] | None = None,
        **given: Any,
    ) -> None:
        """Load a model from a path; `given` are fields of `EngineSettings`.

        A `Model` gets random weights: its answers mean nothing, but take as long. Weights that are
        `lent` lie in this process, and are used there. `ranks` is what the engine's ranks can do
        beside answering.
        """
        settings = settings or EngineSettings(**given)
        started = start_engine(model, settings, ranks=ranks, lent=lent)
        self.engine, self.upkeep, self._words, self.start_up = started

    @property
    def words(self) -> Words:
        """The model's tokenizer."""
        if self._words is None:
            what = "a model with random weights has no words"
            raise InputError([Problem("prompts", what, "give prompts as tokens")])
        return self._words

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling | Sequence[Sampling] = Sampling(),  # noqa: B008 - a frozen value
        *,
        each: Callable[[Piece], None] | None = None,
        adapter: str | None = None,
    ) -> list[Completion]:
        """Continue prompts, texts or tokens; `each` hears all pieces as they come."""
        several = _several(prompts)
        samplings = [sampling] * len(several) if isinstance(sampling, Sampling) else list(sampling)
        if len(samplings) != len(several):
            what = f"{len(samplings)} for {len(several)} prompts"
            raise InputError([Problem("sampling", what, "give one, or one for each prompt")])
        asks = [
            Ask(prompt=self._tokens(prompt), sampling=settings, adapter=adapter)
            for prompt, settings in zip(several, samplings, strict=True)
        ]
        return self.answer(asks, each=each)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling: Sampling = Sampling(),  # noqa: B008 - a frozen value
        *,
        each: Callable[[Piece], None] | None = None,
        adapter: str | None = None,
        **values: Any,
    ) -> Completion:
        """Answer the last message of a conversation; `values` are for the model's template."""
        text = self.words.chat(messages, **{"add_generation_prompt": True, **values})
        tokens = tuple(self.words.encode(text, special=False))
        ask = Ask(prompt=tokens, sampling=sampling, adapter=adapter)
        return self.answer([ask], each=each)[0]

    def check(self, ask: Ask) -> None:
        """Raise `InputError` where an ask cannot be answered at all."""
        self.engine.check(ask)

    def answer(
        self, asks: Sequence[Ask], *, each: Callable[[Piece], None] | None = None
    ) -> list[Completion]:
        """Answer asks, all at once; those that may be longest begin first, to end with the rest."""
        for ask in asks:
            self.check(ask)
        heard = [_Heard(ask, each) for ask in asks]
        for number in longest_first([self.engine.room_of(ask) for ask in asks]):
            self.engine.add(asks[number], heard[number])
        while not self.engine.is_idle:
            self.engine.turn()
            for sink, piece in self.engine.outbox():
                sink(piece)
        return [one.completion() for one in heard]

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self.words.encode(prompt) if isinstance(prompt, str) else prompt)


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return prompts as a list: one may come alone, as a text or as its tokens."""
    if isinstance(prompts, str):
        return [prompts]
    found: list[Prompt] = []
    numbers: list[int] = []
    for each in prompts:
        if isinstance(each, int):
            numbers.append(each)
        else:
            found.append(each)
    return [numbers] if numbers and not found else found
