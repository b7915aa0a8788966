"""Two features of the engine at once: asks answered with both, and what each has to show for it.

What answers ought to be is computed one token at a time by a decoder that keeps nothing. Where keys
are rounded, or an adapter stands beside rounded weights, that decoder is none of this kind: a plain
engine then answers one ask after another.
"""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from meshwright.run.serve.asked import Ask, Grammar, Piece, Sampling, TokenLogprob
from meshwright.run.serve.engine.answer import Answer, Silent, Text
from meshwright.run.serve.engine.guessing import LookedUp
from meshwright.run.serve.engine.orders import Orders
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.engine.start import Started, start_engine
from meshwright.run.serve.model.words import load_words
from meshwright.run.serve.parcels import collect
from meshwright.run.serve.sampling.grammar import Grammars
from meshwright.run.serve.sampling.masks import Masks
from meshwright.run.serve.sampling.sampler import Sampler
from meshwright.run.serve.sampling.stops import Answer as Following
from meshwright.spec.serving import Limits
from scripts.serve_features import IDLE
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


# What answers ought to be.


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
    started = _plain_engine(features)
    _answered(trial, started, [msgspec.json.decode(said, type=Ask)])
    return trial.heard[0].choices


@cache
def _plain_engine(features: tuple[str, ...]) -> Started:
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


# Both at once.


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
            _answered(Trial(("", "")), each, wanted[:1])
            each.upkeep.sleep()
            weights = each.engine.runner.forward.decoder.parameters()
            trial.slept = sum(weight.numel() for weight in weights) == 0
            each.upkeep.wake()
    for each in trial.engines:
        _watch(trial, each)
    # What the first leaves in the cache is there for the others.
    for wave in (wanted[:1], wanted[1:]):
        _answered(trial, trial.engines[-1], [_handed(trial, ask) for ask in wave])
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
    _turns(trial.engines[0])
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


def _answered(trial: Trial, started: Started, wave: list[Ask]) -> None:
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
        _turns(started, 4)
        adapter = "poet" if trial.has("adapter") else None
        trial.vectors = started.upkeep.embed([wave[0].prompt, wave[-1].prompt], adapter=adapter)
    if len(wave) > 1 and trial.has("cancel"):
        # One that may wait still, and one that is being answered.
        engine.cancel(under_way[-1])
        _turns(started, 5)
        engine.cancel(under_way[1])
    _turns(started)


def _turns(started: Started, most: int = 2000) -> None:
    engine = started.engine
    for _ in range(most):
        busy = engine.turn()
        for sink, piece in engine.outbox():
            sink(piece)
        if not busy and engine.is_idle:
            return
    assert most < 2000, "the engine comes to no end"


# What has to be seen.


def check(trial: Trial) -> None:
    """Check answers, and that each feature did what it is for."""
    for heard in trial.heard:
        assert not heard.error, heard.error
        for found, want in zip(heard.choices, expected(trial.features, heard.ask), strict=True):
            _same(found, want)
    for name in trial.features:
        if name in SEEN:
            assert SEEN[name](trial), f"nothing was seen of {name}"
    for each in trial.engines:
        assert each.engine.is_idle
        assert each.engine.batcher.pool.held == 0
        each.engine.close()


def _same(found: Choice, want: Choice) -> None:
    if found.finish == "cancelled":
        assert found.tokens == want.tokens[: len(found.tokens)]
        assert want.text.startswith(found.text)
    else:
        assert (found.tokens, found.finish) == (want.tokens, want.finish)
        assert found.text == want.text
    _as_likely(found.logprobs, want.logprobs[: len(found.tokens)])
    _as_likely(found.told, want.told if found.tokens else [])


def _as_likely(found: list[TokenLogprob], want: list[TokenLogprob]) -> None:
    assert [each.token for each in found] == [each.token for each in want]
    for one, other in zip(found, want, strict=True):
        assert abs(one.logprob - other.logprob) < 1e-3
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def _without(trial: Trial, name: str) -> bool:
    """Say whether some answer is another without a feature."""
    others = [other for other in trial.features if other not in (name, "stop")]
    plain = [expected(others, ask) for ask in asks(others)]
    both = [expected(trial.features, heard.ask) for heard in trial.heard]
    return any(
        one.tokens != other.tokens[: len(one.tokens)]
        for ones, others in zip(both, plain, strict=True)
        for one, other in zip(ones, others, strict=False)
    )


def _prompts_alone(trial: Trial) -> bool:
    return not any(
        any(not part.checks for part in orders.parts)
        and (decodes or any(part.checks for part in orders.parts))
        for decodes, orders in trial.steps
    )


def _vectors(trial: Trial) -> bool:
    """Say whether vectors are those of the same prompts alone, and of the adapter where one is."""
    kept = tuple(name for name in ("int4", "fp8") if trial.has(name))
    kinds, wave, found = kinds_of(trial.features), trial.heard[1:], torch.tensor(trial.vectors)
    prompts = [wave[0].ask.prompt, wave[-1].ask.prompt]
    plain = torch.tensor(_plain_engine((*kinds, *kept)).upkeep.embed(prompts))
    if not trial.has("adapter"):
        return torch.allclose(found, plain, atol=1e-4)
    if kept:
        engine = _plain_engine((*kinds, *kept, "adapter"))
        alone = torch.tensor(engine.upkeep.embed(prompts, adapter="poet"))
    else:
        alone = torch.stack([_pooled(bare(kinds, merged=True), prompt) for prompt in prompts])
    return torch.allclose(found, alone, atol=1e-4) and not torch.allclose(found, plain, atol=1e-2)


@torch.no_grad()
def _pooled(decoder: Any, prompt: Sequence[int]) -> torch.Tensor:
    hidden_TD = decoder.hidden(torch.tensor([prompt]))[0]
    return torch.nn.functional.normalize(hidden_TD.float().sum(0), dim=0)


def _finishes(trial: Trial) -> list[str | None]:
    return [choice.finish for heard in trial.heard for choice in heard.choices]


def _hits(trial: Trial) -> bool:
    hits = trial.engines[0].engine.gauges().prefix_hits
    idle = {name for pair in IDLE if "prefix" in pair for name in pair} - {"prefix"}
    return hits == 0 if idle & set(trial.features) else hits >= 16


def _captured(trial: Trial) -> bool:
    """Say whether steps with prompts were computed as graphs have them, unless they cannot be."""
    runners: list[Any] = [each.engine.runner for each in trial.engines]
    mixed = [getattr(runner, "_runner", runner).mixed for runner in runners]
    steps: int = sum(each.steps for each in mixed if each is not None)
    idle = {name for pair in IDLE if "captured" in pair for name in pair} - {"captured"}
    return steps == 0 if idle & set(trial.features) else steps > 0


def _bound(heard: Heard) -> str:
    grammar = heard.ask.sampling.grammar
    return "" if grammar is None else grammar.text


SEEN: dict[str, Callable[[Trial], bool]] = {
    "prefix": _hits,
    "chunks": lambda trial: (
        max(len(p.tokens) for _, orders in trial.steps for p in orders.parts if not p.checks) == 5
    ),
    "apart": _prompts_alone,
    "captured": _captured,
    "recompute": lambda trial: any(e.engine.batcher.preemptions for e in trial.engines),
    "swap": lambda trial: any(orders.moved_in for _, orders in trial.steps),
    "choices": lambda trial: all(len(heard.choices) == 3 for heard in trial.heard),
    "seed": lambda trial: _without(trial, "seed"),
    "penalties": lambda trial: _without(trial, "penalties"),
    "logprobs": lambda trial: all(
        len(told.top) == 2
        for heard in trial.heard for choice in heard.choices for told in choice.logprobs
    ),
    "stop": lambda trial: any(
        finish == "stop" and heard.ask.sampling.stop
        for heard in trial.heard for finish in (choice.finish for choice in heard.choices)
    ),
    "grammar": lambda trial: any(
        choice.finish == "stop" and re.fullmatch(_bound(heard), choice.text) is not None
        for heard in trial.heard for choice in heard.choices
    ) or trial.has("stop"),
    "guesses": lambda trial: any(
        part.checks and len(part.tokens) > 1 for _, orders in trial.steps for part in orders.parts
    ),
    "draft": lambda trial: any(
        choice.at_once > 1 for heard in trial.heard for choice in heard.choices
    ),
    "told": lambda trial: all(
        len(choice.told) == len(heard.ask.prompt) - 1
        for heard in trial.heard for choice in heard.choices if choice.finish != "cancelled"
    ),
    "adapter": lambda trial: _without(trial, "adapter"),
    "fp8": lambda trial: trial.engines[0].engine.runner.cache.dtype == torch.float8_e4m3fn,
    "int4": lambda trial: any(
        weight.dtype == torch.uint8
        for weight in trial.engines[0].engine.runner.forward.decoder.parameters()
    ),
    "embeddings": _vectors,
    "cancel": lambda trial: _finishes(trial).count("cancelled") >= 2,
    "priority": lambda trial: min(trial.heard[1:], key=lambda h: h.order).ask.priority == 1,
    "parcels": lambda trial: trial.parcels == len(trial.heard),
    "invariant": lambda trial: trial.engines[0].engine.runner.forward.now.invariant,
    "sleep": lambda trial: trial.slept,
    "ranks": lambda _: torch.distributed.get_world_size() == 2,
}  # fmt: skip


def main(*features: str) -> None:
    """Try features with several ranks, in a process of their own that all of them share."""
    torch.set_num_threads(1)
    for name in features:
        print("ranks and", name, file=sys.stderr)
        check(tried((name, "ranks")))


if __name__ == "__main__":
    main(*sys.argv[1:])
