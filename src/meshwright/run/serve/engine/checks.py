"""What can be asked of an engine, and what is wrong with an ask that cannot be answered."""

from typing import NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.run.serve.asked import Ask
from meshwright.run.serve.sampling.lines import problems_of
from meshwright.spec.bounds import whole
from meshwright.spec.names import unknown_name


class Offer(NamedTuple):
    """What an engine answers."""

    vocab: int
    max_length: int
    choices: int
    """Answers to one prompt, at most."""
    adapters: tuple[str, ...]
    words: bool
    """Whether it can make text of tokens."""
    asleep: bool
    hands_over: bool
    """Whether keys and values can go to another engine, or come from one."""
    block_tokens: int
    block_bytes: int


def check_ask(ask: Ask, offer: Offer) -> None:
    """Raise `InputError` with everything that keeps an ask from being answered."""
    problems = [
        *_prompt(ask.prompt, offer),
        *problems_of(ask.sampling, offer.vocab),
        *_extras(ask, offer),
    ]
    if problems:
        raise InputError(problems)


def _prompt(prompt: tuple[int, ...], offer: Offer) -> list[Problem]:
    if not prompt:
        return [Problem("prompt", "holds no token", "give one at least")]
    problems = []
    if not 0 <= min(prompt) <= max(prompt) < offer.vocab:
        wrong = next(token for token in prompt if not 0 <= token < offer.vocab)
        fix = f"use ids from 0 to {offer.vocab - 1}"
        problems.append(Problem("prompt", f"{wrong} is no token of this model", fix))
    if len(prompt) >= offer.max_length:
        what = f"{len(prompt):,} tokens leave no room for an answer in {offer.max_length:,}"
        problems.append(Problem("prompt", what, "shorten it"))
    return problems


def _extras(ask: Ask, offer: Offer) -> list[Problem]:
    sampling, problems = ask.sampling, []
    if offer.asleep:
        problems.append(Problem("engine", "it sleeps", "wake it"))
    if sampling.n > offer.choices:
        what = f"{sampling.n} answers at a time, the engine has {offer.choices}"
        problems.append(Problem("n", what, f"use at most {offer.choices}"))
    if ask.adapter is not None and ask.adapter not in offer.adapters:
        problems.append(unknown_name("adapter", ask.adapter, offer.adapters, "adapter"))
    if (ask.hands_over or ask.brought is not None) and (sampling.n > 1 or not offer.hands_over):
        what = "one answer of a model on one device, without states or guesses, can be handed over"
        problems.append(Problem("hands_over", what, "ask one engine for it"))
    if ask.brought is not None and sampling.logprobs is not None and ask.brought.likely is None:
        what = "nothing tells how likely the token was that came with keys and values"
        problems.append(Problem("brought", what, "hand the prompt over with logprobs too"))
    held = -(-len(ask.prompt) // offer.block_tokens)
    if ask.brought is not None and ask.brought.size != held * offer.block_bytes:
        what = f"{ask.brought.size:,} bytes for {held} blocks of {offer.block_bytes:,}"
        fix = "both engines need the same model, block size and number format"
        problems.append(Problem("brought", what, fix))
    if ask.prompt_logprobs is not None:
        problems += whole("prompt_logprobs", ask.prompt_logprobs, least=0, most=20)
        if ask.hands_over or ask.brought is not None:
            what = "how likely a prompt was is not told when it is handed over"
            problems.append(Problem("prompt_logprobs", what, "ask one engine for it"))
    problems += [
        Problem(name, "needs the model's words, which this engine has not", "leave it out")
        for name in ("stop", "grammar")
        if getattr(sampling, name) and not offer.words
    ]
    return problems
