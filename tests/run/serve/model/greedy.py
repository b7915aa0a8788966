"""A batcher for tests: sequences with blocks of their own, continued greedily."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from meshwright.run.serve.model.forward_batch import BatchRow, build_forward_batch
from meshwright.run.serve.model.served_model import ServedModel


@dataclass
class Running:
    """A prompt and its answer so far."""

    tokens: list[int]
    blocks: list[int]
    state: int
    prompt: int
    done: int = 0
    """Tokens whose keys are in the cache."""
    adapter: int = -1

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt :]


@dataclass
class Batch:
    """Sequences that share a cache."""

    forward: ServedModel
    rows: list[Running] = field(default_factory=list)
    used: int = 0

    def add(self, prompt: Sequence[int], *, shares: int = 0, adapter: int = -1) -> Running:
        """Add a prompt; the first `shares` blocks are those of the first sequence."""
        size = self.forward.kv_cache.block_size
        blocks = self.rows[0].blocks[:shares] if shares else []
        row = Running(list(prompt), list(blocks), len(self.rows), len(prompt), shares * size)
        row.adapter = adapter
        self.rows.append(row)
        return row

    def step(self, rows: Sequence[Running], chunk: int | None = None) -> None:
        """Compute what each row has to, at most `chunk` tokens; append where all is computed."""
        size = self.forward.kv_cache.block_size
        parts = []
        for row in rows:
            new = row.tokens[row.done :][:chunk]
            while len(row.blocks) * size < row.done + len(new):
                # Backwards through the cache, so that neighbours in a table are none in memory.
                self.used += 1
                row.blocks.append(self.forward.kv_cache.num_blocks - self.used)
            parts.append(BatchRow(new, row.done, row.blocks, row.state, row.adapter))
        device = self.forward.kv_cache.device
        chosen = self.forward.forward(build_forward_batch(parts, size, device)).argmax(-1).tolist()
        for row, part, token in zip(rows, parts, chosen, strict=True):
            row.done += len(part.tokens)
            if row.done == len(row.tokens):
                row.tokens.append(token)


def greedy(
    forward: ServedModel, prompts: Sequence[Sequence[int]], new: int, *, chunk: int | None = None
) -> list[list[int]]:
    """Continue prompts by `new` tokens; a prompt joins one step after the one before it."""
    batch = Batch(forward)
    rows = [batch.add(prompt) for prompt in prompts]
    steps = 0
    while active := [row for row in rows[: steps + 1] if len(row.answer) < new]:
        batch.step(active, chunk)
        steps += 1
    return [row.answer for row in rows]


def random_prompts(
    vocab: int, lengths: Sequence[int] = (11, 5, 18), seed: int = 0
) -> list[list[int]]:
    """Draw prompts."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]
