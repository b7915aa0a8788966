"""What is asked with two features, and what the answers ought to be.

They are computed one token at a time by a decoder that keeps nothing. Where keys are rounded, or
an adapter stands beside rounded weights, that decoder is none of this kind: a plain engine then
answers one ask after another.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import msgspec
import torch

from meshwright.run.serve.asked import Ask, Grammar, Sampling, TokenLogprob
from meshwright.run.serve.engine.answer import Silent, Text
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.engine.start import Started, start_engine
from meshwright.run.serve.model.words import load_words
from meshwright.run.serve.sampling.grammar import Grammars
from meshwright.run.serve.sampling.masks import Masks
from meshwright.run.serve.sampling.sampler import Sampler
from meshwright.run.serve.sampling.stops import Answer as Following
from meshwright.spec.serving import Limits
from tests.run.serve.pairs.heard import Choice, Trial, answered
from tests.run.serve.served_folders import VOCAB, bare, folder, named

OUTPUT = 16
_GRAMMAR = Grammar(kind="regex", text="[a-f ]{9,14}")
_WIDE = Grammar(kind="regex", text="[ -~]{9,14}")
"""What a draft that knows of no grammar may guess now and then."""
_LIMITS = {"batch_tokens": 32, "batch_requests": 5, "block_tokens": 4, "kv_blocks": 64}
_KINDS = ("window", "latent", "recurrent")

LIMITS: dict[str, dict[str, Any]] = {
    "chunks": {"chunk_tokens": 5},
    "apart": {"mixing": "apart"},
    "captured": {"graph_tokens": 32},
    "recompute": {"kv_blocks": 14},
    "swap": {"kv_blocks": 14, "preemption": "swap", "host_blocks": 32},
    "fp8": {"kv_precision": "fp8"},
    "priority": {"batch_requests": 3},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "guesses": {"guesses": 3},
    "int4": {"weights": "int4"},
    "invariant": {"invariant": True},
    "ranks": {"tp": 2},
}
SAMPLING: dict[str, dict[str, Any]] = {
    "choices": {"n": 3},
    "seed": {"temperature": 1.3, "seed": 11, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "logprobs": {"logprobs": 2},
    "grammar": {"grammar": _GRAMMAR},
}


def prompts(words: int = VOCAB) -> list[tuple[int, ...]]:
    """Return prompts, of which some begin alike and one says things twice."""
    draw = torch.Generator().manual_seed(2)
    rows = torch.randint(3, words, (6, 24), generator=draw).tolist()
    start = tuple(rows[0][:16])
    return [
        (*start, *rows[1][:5]),
        (*rows[2][:9],),
        (*start, *rows[3][:3]),
        (*rows[4][:6], *rows[4][:6], *rows[4][:4]),
        (*rows[5][:3],),
    ]


def kinds_of(features: Sequence[str]) -> tuple[str, ...]:
    return tuple(kind for kind in _KINDS if kind in features)


def settings_of(features: Sequence[str]) -> EngineSettings:
    limits: dict[str, Any] = dict(_LIMITS)
    settings: dict[str, Any] = {}
    for name in features:
        limits |= LIMITS.get(name, {})
        settings |= SETTINGS.get(name, {})
    limits["prefix_cache"] = "prefix" in features
    kinds = kinds_of(features)
    beside = folder(kinds[0] if kinds else "")
    if "adapter" in features:
        settings["adapters"] = {"poet": str(beside / "adapter")}
    if "draft" in features:
        settings["draft"] = str((folder("") if "recurrent" in kinds else beside) / "draft")
    return EngineSettings(limits=Limits(**limits), device="cpu", max_length=64, **settings)


def asks(features: Sequence[str]) -> list[Ask]:
    """Return what is asked with these features."""
    given: dict[str, Any] = {"temperature": 0.0, "max_tokens": OUTPUT}
    for name in features:
        given |= SAMPLING.get(name, {})
    if "grammar" in given and "draft" in features:
        given["grammar"] = _WIDE
    found = []
    for number, prompt in enumerate(prompts()):
        ask = Ask(
            prompt=prompt,
            sampling=Sampling(**given),
            adapter="poet" if "adapter" in features and number % 2 == 0 else None,
            priority=int("priority" in features and number > 1),
            prompt_logprobs=2 if "told" in features else None,
            tenant=f"tenant {number % 3}" if "priority" in features else "",
        )
        if "stop" in features:
            whole = expected(features, ask)[0].text
            stops = [letter for letter in whole[:-1] if letter != "\ufffd"][-3:]
            sampling = msgspec.structs.replace(ask.sampling, stop=tuple(stops[:1]))
            ask = msgspec.structs.replace(ask, sampling=sampling)
        found.append(ask)
    return found


def expected(features: Sequence[str], ask: Ask) -> list[Choice]:
    """Return the answers to an ask, as they are without anything else."""
    lossy = tuple(name for name in ("int4", "fp8") if name in features)
    plain = msgspec.structs.replace(ask, priority=0, tenant="", brought=None)
    if "fp8" in lossy or ("int4" in lossy and ask.adapter):
        adapter = ("adapter",) if ask.adapter else ()
        return _engine_alone((*kinds_of(features), *lossy, *adapter), msgspec.json.encode(plain))
    return [
        _written(kinds_of(features), msgspec.json.encode(plain), choice, "int4" in lossy)
        for choice in range(ask.sampling.n)
    ]


@cache
def _engine_alone(features: tuple[str, ...], said: bytes) -> list[Choice]:
    trial = Trial(("", ""))
    started = plain_engine(features)
    answered(trial, started, [msgspec.json.decode(said, type=Ask)])
    return trial.heard[0].choices


@cache
def plain_engine(features: tuple[str, ...]) -> Started:
    return start_engine(named(kinds_of(features)), settings_of(features))


@cache
def _written(kinds: tuple[str, ...], said: bytes, choice: int, int4: bool) -> Choice:
    """Write an answer token by token, with a decoder that keeps nothing."""
    ask = msgspec.json.decode(said, type=Ask)
    decoder = bare(kinds, merged=ask.adapter is not None, int4=int4)
    sampling, ids, found = ask.sampling, list(ask.prompt), Choice()
    if ask.prompt_logprobs is not None:
        found.told = _told(decoder, ids, ask.prompt_logprobs)
    words = None if len(kinds) > 1 else load_words(folder(kinds[0] if kinds else ""))
    guide = None
    follows: Text = Silent(frozenset(), frozenset(), 0, OUTPUT)
    ends: tuple[int, ...] = ()
    if words is not None:
        ends = tuple(words.ends)
        follows = Following(words.reader(()), sampling, ends, OUTPUT)
        if sampling.grammar is not None:
            grammars = Grammars(words.tokenizer.to_str(), VOCAB, sorted(words.ends))
            guide = grammars.guide(sampling.grammar)
    while found.finish is None:
        sampler = Sampler(1, VOCAB, "cpu", eos=ends)
        sampler.set(0, sampling, ask.prompt, tuple(found.tokens), choice=choice)
        mask = None
        if guide is not None:
            masks = Masks(VOCAB, torch.device("cpu"))
            masks.begin([(0, guide, ())], 1)
            mask = masks.ready()
        with torch.no_grad():
            logits = decoder(torch.tensor([ids]))[0, -1:].clone()
        drawn = sampler.sample(logits, sampler.plan((0,)), mask_RW=mask)
        token = int(drawn.tokens[0])
        if guide is not None:
            guide.advance([token])
        step = follows.add([token], ended=guide is not None and guide.ended)
        ids.append(token)
        found.tokens.append(token)
        found.text, found.finish = found.text + step.text, step.finish
        if drawn.told is not None:
            own, top, names = (part[0] for part in drawn.told)
            others = tuple(zip(names.tolist(), top.tolist(), strict=True))
            found.logprobs.append(TokenLogprob(token, float(own), others))
    return found


def _told(decoder: Any, prompt: list[int], top: int) -> list[TokenLogprob]:
    """Return how likely a prompt's tokens after its first were."""
    with torch.no_grad():
        rows = decoder(torch.tensor([prompt]))[0, :-1].log_softmax(1)
    found = []
    for row, token in zip(rows, prompt[1:], strict=True):
        values, names = row.topk(top)
        others = tuple(zip(names.tolist(), values.tolist(), strict=True))
        found.append(TokenLogprob(token, float(row[token]), others))
    return found
