"""`Clocked`: one replica on a virtual clock. The batcher decides, a cost model says how long it takes.

Steps in which nothing but decoding happens are taken many at a time, until somebody ends, blocks
run out or `until` comes; a step that has begun is never cut short.
"""

from math import sqrt
from typing import NamedTuple

from meshwright.policy.batching import Batch, Batcher, Sequence
from meshwright.predict.serving.step_cost import StepCost


class Stretch(NamedTuple):
    """Steps that were taken together."""

    start_s: float
    end_s: float
    steps: int
    decodes: int
    """Sequences that decoded in each of them."""
    prompt_tokens: int
    """Tokens of prompts that the step computed; 0 where there were several steps."""
    held: int
    """Blocks in use at their end."""
    waiting: int


class Clocked:
    """A batcher whose steps take as long as a cost model says."""

    def __init__(self, batcher: Batcher, cost: StepCost) -> None:
        self.batcher, self.cost = batcher, cost
        self.now_s = 0.0
        self.busy_s = 0.0
        self.prompt_tokens = 0
        """Tokens of prompts that were computed, those computed again included."""

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.batcher.running and not self.batcher.waiting

    def step(self, until_s: float) -> tuple[Stretch, list[Sequence], list[Sequence]] | None:
        """Take a step, or many; return them with who got a first token and who ended.

        None where there is nothing to do.
        """
        batcher, start = self.batcher, self.now_s
        steps = batcher.horizon()
        if steps:
            decodes = len(batcher.decoding)
            steps, took = self._fold(steps, decodes, until_s - start)
            finished = batcher.leap(steps)
            began: list[Sequence] = []
            prompts = 0
        else:
            batch = batcher.next()
            if batch is None:
                return None
            steps, decodes, began, finished = 1, batch.decodes, batch.joined, batch.finished
            prompts, took = self._price(batch)
            began += [child for _, child in batch.forked]
        self.now_s = end = start + took
        self.busy_s += took
        waiting, held = len(batcher.waiting), batcher.pool.held
        return Stretch(start, end, steps, decodes, prompts, held, waiting), began, finished

    def _fold(self, steps: int, decodes: int, left_s: float) -> tuple[int, float]:
        """Return how many decoding steps begin within some time, and how long they take."""
        keys = self.batcher.decoding.context
        fixed, slope = self.cost.decode_line(decodes, (keys + (steps - 1) * decodes / 2) / decodes)
        first, more = fixed + slope * keys, slope * decodes
        took = steps * (first + more * (steps - 1) / 2)
        if took <= left_s or steps == 1:
            return steps, took
        # The k-th step begins at k · first + more · k (k − 1) / 2.
        half = first - more / 2
        if more > 0:
            steps = min(
                steps, int((sqrt(half * half + 2 * more * max(left_s, 0.0)) - half) / more) + 1
            )
        else:
            steps = min(steps, int(max(left_s, 0.0) / first) + 1)
        return steps, steps * (first + more * (steps - 1) / 2)

    def _price(self, batch: Batch) -> tuple[int, float]:
        tokens = pairs = sampled = 0
        for _, start, stop, samples in batch.chunks:
            count = stop - start
            tokens += count
            # Each token sees those before it and itself.
            pairs += count * (start + stop + 1) // 2
            sampled += samples
        self.prompt_tokens += tokens
        took = self.cost.step_s(
            prefill_tokens=tokens,
            prefill_pairs=pairs,
            decodes=batch.decodes,
            context_sum=batch.context,
            sampled=batch.decodes + sampled,
        )
        return tokens, took
