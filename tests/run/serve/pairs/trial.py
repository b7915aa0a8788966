"""Asks answered by an engine with two features at once."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec

from meshwright.run.serve.asked import Ask, Piece
from meshwright.run.serve.engine.answer import Answer
from meshwright.run.serve.engine.guessing import LookedUp
from meshwright.run.serve.engine.orders import Orders
from meshwright.run.serve.engine.start import Started, start_engine
from tests.run.serve.pairs.asked import asks, expected, kinds_of, settings_of
from tests.run.serve.pairs.heard import Trial, answered, turns
from tests.run.serve.served_folders import named


def tried(features: tuple[str, str]) -> Trial:
    """Ask with two features at once."""
    with patch.object(LookedUp, "_lookup", _knowing(features)):
        return _tried(features)


def _knowing(features: tuple[str, str]) -> Any:
    """Look up what answers ought to be, every third token wrong: random models repeat nothing."""
    known = {ask.prompt: ask for ask in asks(features)} if "guesses" in features else {}

    def lookup(_: LookedUp, answer: Answer) -> Any:
        whole = expected(features, known[answer.ask.prompt])[answer.choice].tokens
        ahead = enumerate(whole[answer.written :], answer.written)
        guessed = [token if place % 3 else 7 for place, token in ahead]
        return SimpleNamespace(propose=lambda most: guessed[:most])

    return lookup


def _tried(features: tuple[str, str]) -> Trial:
    trial, wanted = Trial(features), asks(features)
    source, settings = named(kinds_of(features)), settings_of(features)
    trial.engines.append(
        _among_ranks(features) if trial.has("ranks") else start_engine(source, settings)
    )
    if trial.has("parcels"):
        trial.engines[0].engine.check(msgspec.structs.replace(wanted[0], hands_over=True))
        trial.engines.append(start_engine(source, settings))
    if trial.has("sleep"):
        for each in trial.engines:
            answered(Trial(("", "")), each, wanted[:1])
            each.upkeep.sleep()
            weights = each.engine.runner.forward.decoder.parameters()
            trial.slept = sum(weight.numel() for weight in weights) == 0
            each.upkeep.wake()
    for each in trial.engines:
        _watch(trial, each)
    # What the first leaves in the cache is there for the others.
    for wave in (wanted[:1], wanted[1:]):
        answered(trial, trial.engines[-1], [_handed(trial, ask) for ask in wave])
    return trial


def _among_ranks(features: Sequence[str]) -> Started:
    """Start an engine of several ranks, of which a process has one."""
    said = (kinds_of(features), msgspec.json.encode(settings_of(features)))
    if said not in _RANKS:
        _RANKS[said] = start_engine(named(said[0]), settings_of(features))
    return _RANKS[said]


_RANKS: dict[tuple[tuple[str, ...], bytes], Started] = {}


def _handed(trial: Trial, ask: Ask) -> Ask:
    """Let the first engine compute a prompt, where prompts are handed over."""
    if not trial.has("parcels"):
        return ask
    heard: list[Piece] = []
    engine = trial.engines[0].engine
    engine.add(msgspec.structs.replace(ask, hands_over=True), heard.append)
    turns(trial.engines[0])
    (piece,) = heard
    assert piece.parcel is not None, piece
    trial.parcels += 1
    return msgspec.structs.replace(ask, brought=piece.parcel)


def _watch(trial: Trial, started: Started) -> None:
    runner = started.engine.runner
    compute = runner.compute
    alone: Any = getattr(runner, "_runner", runner)

    def watched(orders: Orders) -> Any:
        done = compute(orders)
        trial.steps.append((bool(alone._decoding), orders))
        return done

    runner.compute = watched  # type: ignore[method-assign]
