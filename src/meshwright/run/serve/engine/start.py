"""`start_engine`: from a model on disk to an engine that takes asks, and where the time went."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.serve.asked import Ask, Sampling
from meshwright.run.serve.engine.build import Clock, build_runner, check_length
from meshwright.run.serve.engine.doing import Do, Does, HalfRenewed, Unchanged
from meshwright.run.serve.engine.drafting import Drafted
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.guessing import Guesses, LookedUp
from meshwright.run.serve.engine.ranks import SERVED, Followers, Leading, Ranks, check_ranks
from meshwright.run.serve.engine.runner import Runner
from meshwright.run.serve.engine.runs import Runs
from meshwright.run.serve.engine.settings import GUESSES, EngineSettings
from meshwright.run.serve.engine.upkeep import Upkeep
from meshwright.run.serve.model.gguf_file import context_of, is_gguf
from meshwright.run.serve.model.load import name_of
from meshwright.run.serve.model.words import Words, load_words
from meshwright.run.serve.parcels import post_of
from meshwright.run.serve.sampling.grammar import Grammars
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import load_config


class Started(NamedTuple):
    """An engine that takes asks."""

    engine: Engine
    upkeep: Upkeep
    words: Words | None
    """None where the weights were drawn and there is no tokenizer."""
    took: tuple[tuple[str, float], ...]
    """What was done until then, and the seconds of each."""


def start_engine(
    source: str | Path | Model,
    settings: EngineSettings,
    *,
    ranks: Ranks = SERVED,
    parcels_at: str = "",
    lent: Mapping[str, Tensor] | None = None,
) -> Started:
    """Start an engine for the model at a path, or for a `Model` whose weights are drawn.

    `ranks` is what its ranks can do beside answering; `parcels_at` the folder of its parcels in
    shared memory, where whoever starts it takes that away when it is gone. `lent` are weights of a
    model in this process that nobody changes: they are used where they lie, and none are read.
    """
    clock = Clock()
    check_start(source, settings)
    with clock("words"):
        words = None
        if not isinstance(source, Model) and not settings.random_weights:
            words = load_words(source)
            if settings.draft:
                _check_draft(words, settings.draft)
    ends = () if words is None else tuple(words.ends)
    runner, do, first = _runs(source, settings, ends, clock, ranks, lent=lent)
    if runner.cache.device.type == "cuda":
        with clock("first answers"):
            _answer_once(Engine(runner, settings.limits, guesses=_guesses(runner, settings)))
    engine = Engine(
        runner,
        settings.limits,
        ends=frozenset() if words is None else words.ends,
        reader=None if words is None else words.reader,
        grammars=None if words is None else _grammars(words, runner.forward.decoder.model.vocab),
        guesses=_guesses(runner, settings),
        post=post_of(settings.parcels, folder=parcels_at),
    )
    # Those that are drawn are drawn alike by every engine.
    engine.weights = "" if isinstance(source, Model) else name_of(source)
    quantised = settings.weights != "model"
    upkeep = Upkeep(
        engine, do, first=first, quantised=quantised, ranks=settings.tp, lent=lent is not None
    )
    return Started(engine, upkeep, words, tuple(clock.took))


def check_start(source: str | Path | Model, settings: EngineSettings) -> None:
    """Raise where a model cannot be served so, before minutes go by in which weights are read."""
    if not isinstance(source, Model) and is_gguf(Path(source)):
        if (context := context_of(Path(source))) is not None:
            check_length(context, settings)
        return
    model = source if isinstance(source, Model) else load_config(source)
    check_length(model.max_positions, settings)
    check_ranks(model, settings)


def _guesses(runner: Runs, settings: EngineSettings) -> Guesses | None:
    """Return what guesses ahead, where something is to."""
    if isinstance(runner, Runner) and runner.draft is not None:
        vocab, most = runner.forward.decoder.model.vocab, settings.guesses or GUESSES
        return Drafted(runner.draft, vocab, most, batch_tokens=settings.limits.batch_tokens)
    return LookedUp(settings.guesses) if settings.guesses else None


def _check_draft(words: Words, draft: str) -> None:
    """Raise where a draft has other words: its guesses would say something else."""
    ours, its = (each.tokenizer.get_vocab() for each in (words, load_words(draft)))
    same = sum(its.get(word) == number for word, number in ours.items())
    # Versions of one tokenizer differ in a few special tokens.
    if same < 0.99 * len(ours):
        what = f"only {same:,} of the model's {len(ours):,} words have the same numbers in it"
        raise InputError([Problem("draft", what, "use a smaller model of the same family")])


def _answer_once(engine: Engine) -> None:
    """Answer a few asks, so that all kernels are compiled, or fail, before somebody waits."""
    limits = engine.limits
    half = max(1, min(limits.batch_tokens, engine.max_length - 4) // 2)
    sampling = Sampling(max_tokens=3, top_p=0.9, ignore_eos=True, seed=0)
    # A prompt, the same again beside one that decodes, and one that begins in the cache.
    for length in (half, half, min(half + limits.block_tokens, engine.max_length - 4)):
        engine.add(Ask(prompt=(0,) * length, sampling=sampling), lambda _: None)
        engine.turn()
    while not engine.is_idle:
        engine.turn()
    engine.batcher.pool.forget()


def _runs(
    source: str | Path | Model,
    settings: EngineSettings,
    ends: tuple[int, ...],
    clock: Clock,
    ranks: Ranks,
    *,
    lent: Mapping[str, Tensor] | None,
) -> tuple[Runs, Does, Does]:
    """Return what carries out orders on all ranks, and what does other things: on all, on one."""
    if settings.tp == 1:
        alone = build_runner(source, settings, ends, clock, lent=lent)
        own = ranks.doer(alone, settings)
        return alone, own, own
    with clock("ranks"):
        told = source if isinstance(source, Model) else str(source)
        followers = Followers(told, settings, ends, ranks.module)
    runner = build_runner(source, settings, ends, clock, followers.mesh)
    doer = ranks.doer(runner, settings)

    def everywhere(do: Do) -> list[float]:
        followers.tell(do)
        try:
            return doer(do)
        except Unchanged as error:
            raise HalfRenewed(f"{error}; other ranks may have done it") from error

    return Leading(runner, followers), everywhere, doer


def _grammars(words: Words, vocab: int) -> Grammars:
    return Grammars(words.tokenizer.to_str(), vocab, sorted(words.ends))
