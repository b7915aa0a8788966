"""What is heard of an engine that answers, turn by turn."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import msgspec

from meshwright.run.serve.engine.model_input import ModelInput
from meshwright.run.serve.engine.startup import StartedEngine
from meshwright.run.serve.kv_transfer.transport import receive_kv
from meshwright.run.serve.request import Request, RequestOutput, TokenLogprob


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

    ask: Request
    choices: list[Choice] = field(init=False)
    order: int = -1
    error: str = ""

    def __post_init__(self) -> None:
        self.choices = [Choice() for _ in range(self.ask.sampling_params.n)]


@dataclass
class Trial:
    """What was seen of two features together."""

    features: tuple[str, str]
    heard: list[Heard] = field(default_factory=list)
    steps: list[tuple[bool, ModelInput]] = field(default_factory=list)
    """Whether rows decoded, and what else a step did."""
    vectors: list[list[float]] = field(default_factory=list)
    slept: bool = False
    transfers: int = 0
    engines: list[StartedEngine] = field(default_factory=list)

    def has(self, name: str) -> bool:
        return name in self.features


def answered(trial: Trial, started: StartedEngine, wave: list[Request]) -> None:
    engine, number = started.engine, count()

    def sink_of(heard: Heard) -> Callable[[RequestOutput], None]:
        def sink(piece: RequestOutput) -> None:
            # A token that is brought comes before there is any turn.
            if heard.order < 0 and (heard.ask.remote_kv is None or heard.choices[0].tokens):
                heard.order = next(number)
            choice = heard.choices[piece.index]
            choice.tokens += piece.token_ids
            choice.text += piece.text
            choice.logprobs += piece.logprobs
            choice.told += piece.prompt_logprobs
            choice.at_once = max(choice.at_once, len(piece.token_ids))
            choice.finish = piece.finish_reason or choice.finish
            heard.error = heard.error or piece.error

        return sink

    under_way = []
    for ask in wave:
        heard = Heard(ask)
        trial.heard.append(heard)
        brought = None if ask.remote_kv is None else receive_kv(ask.remote_kv)
        under_way.append(engine.add_request(ask, sink_of(heard), brought))
    if len(wave) > 1 and trial.has("embeddings"):
        turns(started, 4)
        adapter = "poet" if trial.has("adapter") else None
        trial.vectors = started.lifecycle.embed(
            [wave[0].prompt_token_ids, wave[-1].prompt_token_ids], adapter=adapter
        )
    if len(wave) > 1 and trial.has("cancel"):
        # One that may wait still, and one that is being answered.
        engine.abort(under_way[-1])
        turns(started, 5)
        engine.abort(under_way[1])
    turns(started)


def turns(started: StartedEngine, most: int = 2000) -> None:
    engine = started.engine
    for _ in range(most):
        busy = engine.step()
        for sink, piece in engine.take_outputs():
            sink(piece)
        if not busy and engine.is_idle:
            return
    assert most < 2000, "the engine comes to no end"
