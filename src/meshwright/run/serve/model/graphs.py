"""`Graphs`: steps with one token per row, captured once for some numbers of rows and replayed.

A decode step of a small model is hundreds of short kernels; launched one by one they take the host
longer than the device. A graph launches all of them at once, but reads and writes fixed addresses,
and has a fixed number of rows: a step is copied into the graph's own tensors and padded to the next
size. Sizes are captured from the largest down into one pool, so that all share its memory.

Without a GPU the same tensors are filled and padded, and the step is simply computed.

Shapes: R rows, B blocks of the longest table, V vocabulary.
"""

import gc
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.serve.model.cache import PagedCache
from meshwright.run.serve.model.step import NOWHERE, Step


def graph_sizes(most: int) -> tuple[int, ...]:
    """Return the numbers of rows worth a graph: 1, 2, 4, 8, 16, then every eighth up to `most`."""
    return tuple(sorted({size for size in (1, 2, 4, *range(8, most, 8)) if size < most} | {most}))


class Computes(Protocol):
    """Something that computes steps: a `Forward`, or one that prepares their inputs first."""

    cache: PagedCache
    max_length: int

    def run(self, step: Step) -> Tensor:
        """Return the logits of the wanted tokens."""


class Graphs:
    """The captured steps of one `Forward`."""

    def __init__(
        self,
        forward: Computes,
        rows: int,
        *,
        table_blocks: int | None = None,
        sizes: Sequence[int] | None = None,
        adapters: bool = False,
    ) -> None:
        """Make the tensors that graphs read, for at most `rows` rows of `table_blocks` blocks.

        `adapters` lets rows have adapters.
        """
        self.forward, self.rows = forward, rows
        self.sizes = tuple(sorted(sizes or graph_sizes(rows)))
        if self.sizes[-1] != rows:
            what = f"the largest size is {self.sizes[-1]}, but steps have up to {rows} rows"
            raise InputError([Problem("sizes", what, f"end with {rows}")])
        device = forward.cache.device
        longest = -(-forward.max_length // forward.cache.block_tokens)
        whole: dict[str, Any] = {"dtype": torch.int64, "device": device}
        short: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.buffers = Step(
            tokens_N=torch.zeros(rows, **whole),
            positions_N=torch.zeros(rows, **whole),
            slots_N=torch.full((rows,), NOWHERE, **whole),
            tables_RB=torch.zeros(rows, table_blocks or longest, **short),
            lengths_R=torch.zeros(rows, **short),
            starts_R1=torch.arange(rows + 1, **short),
            most_queries=1,
            # States of padding are kept behind those of all sequences.
            states_R=torch.full((rows,), -1, **whole),
            adapters_N=torch.full((rows,), -1, **whole) if adapters else None,
        )
        """What the next replay reads. Whoever writes here itself pads with `pad`."""
        self.room: Tensor | None = None
        """Logits of all sizes, once captured: each would keep its own otherwise, gigabytes."""
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self) -> None:
        """Capture every size; does nothing without a GPU."""
        if self.forward.cache.device.type != "cuda":
            return
        self.pad(0, self.rows)
        pool = torch.cuda.graph_pool_handle()
        gc.collect()
        self.room = None
        self.room = torch.empty_like(self.forward.run(self._cut(self.rows)))
        for size in reversed(self.sizes):
            step = self._cut(size)
            # The first run of a size compiles its kernels and lets libraries find their plans.
            self.forward.run(step)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.forward.run(step)
            self._graphs[size] = graph

    def forget(self) -> None:
        """Drop the captured steps: needed when weights or the cache move."""
        self._graphs, self.room = {}, None

    def covers(self, step: Step) -> bool:
        """Tell whether a step can be replayed."""
        rows, blocks = step.tables_RB.shape
        return (
            step.most_queries == 1
            and step.wanted_W is None
            and rows <= self.rows
            and blocks <= self.buffers.tables_RB.shape[1]
            and (step.adapters_N is None or self.buffers.adapters_N is not None)
        )

    def run(self, step: Step) -> Tensor:
        """Return the logits of the wanted tokens, by a graph where one covers the step."""
        if not self.covers(step):
            return self.forward.run(step)
        self.fill(step)
        return self.replay(len(step.tokens_N))

    def fill(self, step: Step) -> None:
        """Copy a step into the tensors that graphs read, and pad it."""
        to, (rows, blocks) = self.buffers, step.tables_RB.shape
        to.tokens_N[:rows].copy_(step.tokens_N, non_blocking=True)
        to.positions_N[:rows].copy_(step.positions_N, non_blocking=True)
        to.slots_N[:rows].copy_(step.slots_N, non_blocking=True)
        to.tables_RB[:rows, :blocks].copy_(step.tables_RB, non_blocking=True)
        to.lengths_R[:rows].copy_(step.lengths_R, non_blocking=True)
        if step.states_R is not None and to.states_R is not None:
            to.states_R[:rows].copy_(step.states_R, non_blocking=True)
        if to.adapters_N is not None:
            if step.adapters_N is None:
                to.adapters_N[:rows].fill_(-1)
            else:
                to.adapters_N[:rows].copy_(step.adapters_N, non_blocking=True)
        self.pad(rows, self.size_for(rows))

    def pad(self, rows: int, size: int) -> None:
        """Make the rows from `rows` up to `size` padding: nothing is read or kept for them."""
        if rows == size:
            return
        to = self.buffers
        to.slots_N[rows:size].fill_(NOWHERE)
        to.lengths_R[rows:size].zero_()
        to.positions_N[rows:size].zero_()
        if to.states_R is not None:
            to.states_R[rows:size].fill_(-1)
        if to.adapters_N is not None:
            to.adapters_N[rows:size].fill_(-1)

    def size_for(self, rows: int) -> int:
        """Return the size that a step of so many rows is padded to."""
        return self.sizes[bisect_left(self.sizes, rows)]

    def replay(self, rows: int) -> Tensor:
        """Compute what the tensors hold; the logits are overwritten by the next replay."""
        size = self.size_for(rows)
        step = self._cut(size)
        graph = self._graphs.get(size)
        if graph is None:
            return self.forward.run(step)[:rows]
        graph.replay()
        assert step.logits_WV is not None, "what is captured writes its logits here"
        return step.logits_WV[:rows]

    def _cut(self, size: int) -> Step:
        """Return the first rows of the tensors as a step."""
        of = self.buffers
        return Step(
            tokens_N=of.tokens_N[:size],
            positions_N=of.positions_N[:size],
            slots_N=of.slots_N[:size],
            tables_RB=of.tables_RB[:size],
            lengths_R=of.lengths_R[:size],
            starts_R1=of.starts_R1[: size + 1],
            most_queries=1,
            queries=(1,) * size,
            states_R=None if of.states_R is None else of.states_R[:size],
            adapters_N=None if of.adapters_N is None else of.adapters_N[:size],
            logits_WV=None if self.room is None else self.room[:size],
        )
