"""What is heard of an engine that answers, turn by turn."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import msgspec

from meshwright.run.serve.asked import Ask, Piece, TokenLogprob
from meshwright.run.serve.engine.orders import Orders
from meshwright.run.serve.engine.start import Started
from meshwright.run.serve.parcels import collect


class Choice(msgspec.Struct):
    """One answer."""

    tokens: list[int] = []
    text: str = ""
    finish: str | None = None
    logprobs: list[TokenLogprob] = []
    told: list[TokenLogprob] = []
    """How likely the prompt was."""
    at_once: int = 0
    """The most tokens that came with one step."""


@dataclass
class Heard:
    """The answers to one ask."""

    ask: Ask
    choices: list[Choice] = field(init=False)
    order: int = -1
    error: str = ""

    def __post_init__(self) -> None:
        self.choices = [Choice() for _ in range(self.ask.sampling.n)]


@dataclass
class Trial:
    """What was seen of two features together."""

    features: tuple[str, str]
    heard: list[Heard] = field(default_factory=list)
    steps: list[tuple[bool, Orders]] = field(default_factory=list)
    """Whether rows decoded, and what else a step did."""
    vectors: list[list[float]] = field(default_factory=list)
    slept: bool = False
    parcels: int = 0
    engines: list[Started] = field(default_factory=list)

    def has(self, name: str) -> bool:
        return name in self.features


def answered(trial: Trial, started: Started, wave: list[Ask]) -> None:
    engine, number = started.engine, count()

    def sink_of(heard: Heard) -> Callable[[Piece], None]:
        def sink(piece: Piece) -> None:
            # A token that is brought comes before there is any turn.
            if heard.order < 0 and (heard.ask.brought is None or heard.choices[0].tokens):
                heard.order = next(number)
            choice = heard.choices[piece.choice]
            choice.tokens += piece.tokens
            choice.text += piece.text
            choice.logprobs += piece.logprobs
            choice.told += piece.prompt_logprobs
            choice.at_once = max(choice.at_once, len(piece.tokens))
            choice.finish = piece.finish or choice.finish
            heard.error = heard.error or piece.error

        return sink

    under_way = []
    for ask in wave:
        heard = Heard(ask)
        trial.heard.append(heard)
        brought = None if ask.brought is None else collect(ask.brought)
        under_way.append(engine.add(ask, sink_of(heard), brought))
    if len(wave) > 1 and trial.has("embeddings"):
        turns(started, 4)
        adapter = "poet" if trial.has("adapter") else None
        trial.vectors = started.upkeep.embed([wave[0].prompt, wave[-1].prompt], adapter=adapter)
    if len(wave) > 1 and trial.has("cancel"):
        # One that may wait still, and one that is being answered.
        engine.cancel(under_way[-1])
        turns(started, 5)
        engine.cancel(under_way[1])
    turns(started)


def turns(started: Started, most: int = 2000) -> None:
    engine = started.engine
    for _ in range(most):
        busy = engine.turn()
        for sink, piece in engine.outbox():
            sink(piece)
        if not busy and engine.is_idle:
            return
    assert most < 2000, "the engine comes to no end"
