"""How likely the tokens of prompts were: ordered part by part, told with the first piece.

Logits of a whole prompt are never there at once: a few rows at a time are made, read and dropped.

Shapes: T tokens whose successor is known, D hidden, V vocabulary, K likeliest.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from meshwright.run.serve.asked import TokenLogprob
from meshwright.run.serve.engine.orders import Part, Telling
from meshwright.run.serve.sampling.telling import Told

_AT_ONCE = 128
"""Rows of logits that are there at the same time."""


class PromptTelling:
    """What is told of one prompt; the choices of an ask that share its blocks share this."""

    def __init__(self, prompt: Sequence[int], top: int) -> None:
        """Tell of a prompt, and of the `top` likeliest tokens at each place."""
        self._prompt, self._top = prompt, top
        self._ordered = 0
        """Tokens whose successors were told of, once the steps ordered so far are done."""
        self._parts: list[Told] = []

    def order(self, start: int, stop: int) -> Telling | None:
        """Return what a step that computes these tokens has to tell; None where that is nothing.

        Who makes room for others computes a prompt again, and tells no part of it twice.
        """
        begin, end = max(start, self._ordered), min(stop, len(self._prompt) - 1)
        if begin >= end:
            return None
        self._ordered = end
        return Telling(begin - start, tuple(self._prompt[begin + 1 : end + 1]), self._top)

    def add(self, told: Told) -> None:
        """Take what a step tells, which may still be on its way from the device."""
        self._parts.append(told)

    def read(self) -> tuple[TokenLogprob, ...]:
        """Return what was told, when a later step of the same device has been waited for."""
        own = [each for part in self._parts for each in part.own.tolist()]
        top = [each for part in self._parts for each in part.top.tolist()]
        tokens = [each for part in self._parts for each in part.top_tokens.tolist()]
        return tuple(
            TokenLogprob(token, logprob, tuple(zip(numbers, values, strict=True)))
            for token, logprob, numbers, values in zip(
                self._prompt[1:], own, tokens, top, strict=True
            )
        )


def hand_out(
    tellers: Iterable[PromptTelling | None], parts: Iterable[Part], told: Sequence[Told]
) -> None:
    """Give what a step told to whom it is about; each part of the step has its teller."""
    if told:
        ordered = zip(tellers, parts, strict=True)
        wanted = [teller for teller, part in ordered if part.telling is not None]
        for teller, each in zip(wanted, told, strict=True):
            assert teller is not None, "only a teller orders"
            teller.add(each)


def tell_prompt(
    hidden_TD: Tensor, targets_T: Tensor, top: int, logits: Callable[[Tensor], Tensor]
) -> Told:
    """Return how likely tokens were behind hidden states, on its way to the host."""
    parts = [
        _told(logits(hidden_TD[begin : begin + _AT_ONCE]), targets_T[begin : begin + _AT_ONCE], top)
        for begin in range(0, len(targets_T), _AT_ONCE)
    ]
    whole = (torch.cat(each) for each in zip(*parts, strict=True))
    return Told(*(each.to("cpu", non_blocking=True) for each in whole))


def _told(logits_TV: Tensor, targets_T: Tensor, top: int) -> Told:
    raw_TV = logits_TV.float()
    whole_T1 = raw_TV.logsumexp(1, keepdim=True)
    own_T = (raw_TV.gather(1, targets_T[:, None]) - whole_T1).squeeze(1)
    top_TK, top_tokens_TK = raw_TV.topk(min(top, raw_TV.shape[1]), dim=1)
    return Told(own_T, top_TK - whole_T1, top_tokens_TK)
