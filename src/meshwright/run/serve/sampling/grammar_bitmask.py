"""Masks of grammars over the vocabulary: a bit per token, 32 to a word, lowest first.

What a grammar allows next follows from the token before, so masks are made between the moment a
token is read and the moment the next one is drawn: while the device computes the next logits.

    bitmask.start_fill([(0, grammar, ()), (5, other, drafts)], lines=8)     returns at once
    ...                                                                     the device works
    sampler.sample(logits, metadata, mask_LW=bitmask.result())
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from meshwright.run.serve.sampling.structured_output import GrammarMatcher


_ALL = -1


class GrammarBitmask:
    """Makes the masks of one step at a time, beside the thread that asks for them."""

    def __init__(
        self, vocab: int, device: torch.device | str, *, threads: int | None = None
    ) -> None:
        self._words = -(-vocab // 32)
        self._device = torch.device(device)
        self._threads = threads
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._pool: object | None = None
        self._begun: Future[torch.Tensor] | None = None

    def start_fill(
        self, guides: Sequence[tuple[int, "GrammarMatcher", Sequence[int]]], lines: int
    ) -> None:
        """Begin the masks of a step of so many lines of logits.

        Args:
            guides: First line of a request, its guide, and the tokens proposed for it: those have
                the lines that follow. Guides must not move on before `result` returned.
            lines: All lines of the step; those of nobody allow every token.
        """
        self._begun = self._worker.submit(self._made, list(guides), lines) if guides else None

    def result(self) -> torch.Tensor | None:
        """Return the masks that were begun, on the device; None where no line has a grammar."""
        if self._begun is None:
            return None
        mask_LW = self._begun.result()
        self._begun = None
        return mask_LW.to(self._device, non_blocking=True)

    def close(self) -> None:
        """Let the worker end."""
        self._worker.shutdown(wait=False)

    def _made(
        self, guides: list[tuple[int, "GrammarMatcher", Sequence[int]]], lines: int
    ) -> torch.Tensor:
        from llguidance import LLExecutor

        if self._pool is None:
            self._pool = LLExecutor(self._threads)
        assert isinstance(self._pool, LLExecutor)
        # Pinned memory comes from torch's cache, which waits until an earlier copy was read.
        pinned = self._device.type == "cuda"
        mask_LW = torch.full((lines, self._words), _ALL, dtype=torch.int32, pin_memory=pinned)
        where = (mask_LW.data_ptr(), self._words * 4, lines)
        alone = [(guide.matcher, line) for line, guide, proposed in guides if not proposed]
        ahead = [(guide.matcher, line, list(more)) for line, guide, more in guides if more]
        if alone:
            self._pool.unsafe_compute_mask_ptr(alone, *where)
        if ahead:
            self._pool.unsafe_compute_mask_ptr_with_draft_token(ahead, *where)
        return mask_LW
