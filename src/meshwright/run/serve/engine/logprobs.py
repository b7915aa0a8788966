"""How likely drawn tokens were, from lines of a step to the answers that asked."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from meshwright.run.serve.engine.model_input import PromptLogprobsRange, RowChunk
from meshwright.run.serve.request import TokenLogprob
from meshwright.run.serve.sampling.sampled_logprobs import SampledLogprobs
from meshwright.run.serve.sampling.sampling_metadata import SamplingMetadata


def collect_token_logprobs(
    asked: Sequence[int | None],
    lines: SamplingMetadata,
    tokens: Sequence[tuple[int, ...]],
    told: SampledLogprobs,
) -> dict[int, tuple[TokenLogprob, ...]]:
    """Return how likely the tokens of rows were, by place of those who asked.

    Args:
        asked: How many of the likeliest each row wants beside its own tokens; None wants nothing.
        lines: Those of the step.
        tokens: What each row drew.
        told: What the sampler says of the lines.
    """
    own, top, top_tokens = (part.tolist() for part in told)
    at = {line: number for number, line in enumerate(lines.logprob_rows)}
    found: dict[int, tuple[TokenLogprob, ...]] = {}
    begin = 0
    for place, count in enumerate(asked):
        if count is not None:
            numbers = [at[begin + offset] for offset in range(len(tokens[place]))]
            found[place] = tuple(
                TokenLogprob(
                    token,
                    own[number],
                    tuple(zip(top_tokens[number][:count], top[number][:count], strict=True)),
                )
                for token, number in zip(tokens[place], numbers, strict=True)
            )
        begin = lines.row_ends[place]
    return found


_AT_ONCE = 128
"""Rows of logits that are there at the same time."""


class PromptLogprobsCollector:
    """What is told of one prompt; the choices of an ask that share its blocks share this."""

    def __init__(self, prompt: Sequence[int], top: int) -> None:
        """Tell of a prompt, and of the `top` likeliest tokens at each place."""
        self._prompt, self._top = prompt, top
        self._ordered = 0
        """Tokens whose successors were told of, once the steps ordered so far are done."""
        self._parts: list[SampledLogprobs] = []

    def request_range(self, start: int, stop: int) -> PromptLogprobsRange | None:
        """Return what a step that computes these tokens has to tell; None where that is nothing.

        Who makes room for others computes a prompt again, and tells no part of it twice.
        """
        begin, end = max(start, self._ordered), min(stop, len(self._prompt) - 1)
        if begin >= end:
            return None
        self._ordered = end
        return PromptLogprobsRange(
            begin - start, tuple(self._prompt[begin + 1 : end + 1]), self._top
        )

    def add(self, told: SampledLogprobs) -> None:
        """Take what a step tells, which may still be on its way from the device."""
        self._parts.append(told)

    def read(self) -> tuple[TokenLogprob, ...]:
        """Return what was told, when a later step of the same device has been waited for."""
        own = [each for part in self._parts for each in part.token_logprobs.tolist()]
        top = [each for part in self._parts for each in part.top_logprobs.tolist()]
        tokens = [each for part in self._parts for each in part.top_token_ids.tolist()]
        return tuple(
            TokenLogprob(token, logprob, tuple(zip(numbers, values, strict=True)))
            for token, logprob, numbers, values in zip(
                self._prompt[1:], own, tokens, top, strict=True
            )
        )


def distribute_prompt_logprobs(
    tellers: Iterable[PromptLogprobsCollector | None],
    parts: Iterable[RowChunk],
    told: Sequence[SampledLogprobs],
) -> None:
    """Give what a step told to whom it is about; each part of the step has its teller."""
    if told:
        ordered = zip(tellers, parts, strict=True)
        wanted = [teller for teller, part in ordered if part.prompt_logprobs is not None]
        for teller, each in zip(wanted, told, strict=True):
            assert teller is not None, "only a teller orders"
            teller.add(each)


def compute_prompt_logprobs(
    hidden_TD: Tensor, targets_T: Tensor, top: int, logits: Callable[[Tensor], Tensor]
) -> SampledLogprobs:
    """Return how likely tokens were behind hidden states, on its way to the host."""
    parts = [
        _told(logits(hidden_TD[begin : begin + _AT_ONCE]), targets_T[begin : begin + _AT_ONCE], top)
        for begin in range(0, len(targets_T), _AT_ONCE)
    ]
    whole = (torch.cat(each) for each in zip(*parts, strict=True))
    return SampledLogprobs(*(each.to("cpu", non_blocking=True) for each in whole))


def _told(logits_TV: Tensor, targets_T: Tensor, top: int) -> SampledLogprobs:
    raw_TV = logits_TV.float()
    whole_T1 = raw_TV.logsumexp(1, keepdim=True)
    own_T = (raw_TV.gather(1, targets_T[:, None]) - whole_T1).squeeze(1)
    top_TK, top_tokens_TK = raw_TV.topk(min(top, raw_TV.shape[1]), dim=1)
    return SampledLogprobs(own_T, top_TK - whole_T1, top_tokens_TK)
