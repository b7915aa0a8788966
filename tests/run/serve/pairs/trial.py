"""Asks answered by an engine with two features at once."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec

from meshwright.run.serve.engine.model_input import ModelInput
from meshwright.run.serve.engine.sequence_state import SequenceState
from meshwright.run.serve.engine.spec_decode.ngram_proposer import NgramProposer
from meshwright.run.serve.engine.startup import StartedEngine, start_engine
from meshwright.run.serve.request import Request, RequestOutput
from tests.run.serve.pairs.asked import asks, expected, kinds_of, settings_of
from tests.run.serve.pairs.heard import Trial, answered, turns
from tests.run.serve.served_folders import named


def tried(features: tuple[str, str]) -> Trial:
    """Ask with two features at once."""
    with patch.object(NgramProposer, "_lookup", _knowing(features)):
        return _tried(features)


def _knowing(features: tuple[str, str]) -> Any:
    """Look up what answers ought to be, every third token wrong: random models repeat nothing."""
    known = {ask.prompt_token_ids: ask for ask in asks(features)} if "ngram" in features else {}

    def lookup(_: NgramProposer, answer: SequenceState) -> Any:
        whole = expected(features, known[answer.request.prompt_token_ids])[answer.index].tokens
        ahead = enumerate(whole[answer.output_token_count :], answer.output_token_count)
        guessed = [token if place % 3 else 7 for place, token in ahead]
        return SimpleNamespace(propose=lambda most: guessed[:most])

    return lookup


def _tried(features: tuple[str, str]) -> Trial:
    trial, wanted = Trial(features), asks(features)
    source, settings = named(kinds_of(features)), settings_of(features)
    trial.engines.append(
        _among_ranks(features) if trial.has("ranks") else start_engine(source, settings)
    )
    if trial.has("kv_transfer"):
        trial.engines[0].engine.validate_request(
            msgspec.structs.replace(wanted[0], do_remote_decode=True)
        )
        trial.engines.append(start_engine(source, settings))
    if trial.has("sleep"):
        for each in trial.engines:
            answered(Trial(("", "")), each, wanted[:1])
            each.lifecycle.sleep()
            weights = each.engine.runner.model.decoder.parameters()
            trial.slept = sum(weight.numel() for weight in weights) == 0
            each.lifecycle.wake_up()
    for each in trial.engines:
        _watch(trial, each)
    # What the first leaves in the cache is there for the others.
    for wave in (wanted[:1], wanted[1:]):
        answered(trial, trial.engines[-1], [_handed(trial, ask) for ask in wave])
    return trial


def _among_ranks(features: Sequence[str]) -> StartedEngine:
    """Start an engine of several ranks, of which a process has one."""
    said = (kinds_of(features), msgspec.json.encode(settings_of(features)))
    if said not in _RANKS:
        _RANKS[said] = start_engine(named(said[0]), settings_of(features))
    return _RANKS[said]


_RANKS: dict[tuple[tuple[str, ...], bytes], StartedEngine] = {}


def _handed(trial: Trial, ask: Request) -> Request:
    """Let the first engine compute a prompt, where prompts are handed over."""
    if not trial.has("kv_transfer"):
        return ask
    heard: list[RequestOutput] = []
    engine = trial.engines[0].engine
    engine.add_request(msgspec.structs.replace(ask, do_remote_decode=True), heard.append)
    turns(trial.engines[0])
    (piece,) = heard
    assert piece.kv_handle is not None, piece
    trial.transfers += 1
    return msgspec.structs.replace(ask, remote_kv=piece.kv_handle)


def _watch(trial: Trial, started: StartedEngine) -> None:
    runner = started.engine.runner
    compute = runner.execute_model
    alone: Any = getattr(runner, "_runner", runner)

    def watched(orders: ModelInput) -> Any:
        done = compute(orders)
        trial.steps.append((bool(alone._decoding), orders))
        return done

    runner.execute_model = watched  # type: ignore[method-assign]
