"""`DecodeGraphs`: CUDA graphs of decode steps, captured once per batch size and replayed.

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
from meshwright.policy.serving.graph_sizes import list_decode_graph_sizes
from meshwright.run.serve.model.forward_batch import PADDING_SLOT, ForwardBatch
from meshwright.run.serve.model.kv_cache import PagedKVCache


class CapturableModel(Protocol):
    """Something that computes steps: a `ServedModel`, or one that prepares their inputs first."""

    kv_cache: PagedKVCache
    max_model_len: int

    def forward(self, step: ForwardBatch) -> Tensor:
        """Return the logits of the wanted tokens."""


class DecodeGraphs:
    """The captured steps of one `ServedModel`."""

    def __init__(
        self,
        model: CapturableModel,
        max_rows: int,
        *,
        table_blocks: int | None = None,
        sizes: Sequence[int] | None = None,
        adapters: bool = False,
    ) -> None:
        """Make the tensors that graphs read, for at most `max_rows` rows of `table_blocks` blocks.

        `adapters` lets rows have adapters.
        """
        self.model, self.max_rows = model, max_rows
        self.sizes = tuple(sorted(sizes or list_decode_graph_sizes(max_rows)))
        if self.sizes[-1] != max_rows:
            what = f"the largest size is {self.sizes[-1]}, but steps have up to {max_rows} rows"
            raise InputError([Problem("sizes", what, f"end with {max_rows}")])
        device = model.kv_cache.device
        longest = -(-model.max_model_len // model.kv_cache.block_size)
        whole: dict[str, Any] = {"dtype": torch.int64, "device": device}
        short: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.buffers = ForwardBatch(
            tokens_N=torch.zeros(max_rows, **whole),
            positions_N=torch.zeros(max_rows, **whole),
            slot_mapping_N=torch.full((max_rows,), PADDING_SLOT, **whole),
            block_tables_RB=torch.zeros(max_rows, table_blocks or longest, **short),
            seq_lens_R=torch.zeros(max_rows, **short),
            query_start_loc_R1=torch.arange(max_rows + 1, **short),
            max_query_len=1,
            # States of padding are kept behind those of all sequences.
            state_rows_R=torch.full((max_rows,), -1, **whole),
            lora_slots_N=torch.full((max_rows,), -1, **whole) if adapters else None,
        )
        """What the next replay reads. Whoever writes here itself pads with `pad_rows`."""
        self.logits_buffer: Tensor | None = None
        """Logits of all sizes, once captured: each would keep its own otherwise, gigabytes."""
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self) -> None:
        """Capture every size; does nothing without a GPU."""
        if self.model.kv_cache.device.type != "cuda":
            return
        self.pad_rows(0, self.max_rows)
        pool = torch.cuda.graph_pool_handle()
        gc.collect()
        self.logits_buffer = None
        self.logits_buffer = torch.empty_like(self.model.forward(self._cut(self.max_rows)))
        for size in reversed(self.sizes):
            step = self._cut(size)
            # The first run of a size compiles its kernels and lets libraries find their plans.
            self.model.forward(step)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.model.forward(step)
            self._graphs[size] = graph

    def drop(self) -> None:
        """Drop the captured steps: needed when weights or the cache move."""
        self._graphs, self.logits_buffer = {}, None

    def can_replay(self, step: ForwardBatch) -> bool:
        """Tell whether a step can be replayed."""
        rows, blocks = step.block_tables_RB.shape
        return (
            step.max_query_len == 1
            and step.logits_positions_W is None
            and rows <= self.max_rows
            and blocks <= self.buffers.block_tables_RB.shape[1]
            and (step.lora_slots_N is None or self.buffers.lora_slots_N is not None)
        )

    def run(self, step: ForwardBatch) -> Tensor:
        """Return the logits of the wanted tokens, by a graph where one covers the step."""
        if not self.can_replay(step):
            return self.model.forward(step)
        self.copy_inputs(step)
        return self.replay(len(step.tokens_N))

    def copy_inputs(self, step: ForwardBatch) -> None:
        """Copy a step into the tensors that graphs read, and pad it."""
        to, (rows, blocks) = self.buffers, step.block_tables_RB.shape
        to.tokens_N[:rows].copy_(step.tokens_N, non_blocking=True)
        to.positions_N[:rows].copy_(step.positions_N, non_blocking=True)
        to.slot_mapping_N[:rows].copy_(step.slot_mapping_N, non_blocking=True)
        to.block_tables_RB[:rows, :blocks].copy_(step.block_tables_RB, non_blocking=True)
        to.seq_lens_R[:rows].copy_(step.seq_lens_R, non_blocking=True)
        if step.state_rows_R is not None and to.state_rows_R is not None:
            to.state_rows_R[:rows].copy_(step.state_rows_R, non_blocking=True)
        if to.lora_slots_N is not None:
            if step.lora_slots_N is None:
                to.lora_slots_N[:rows].fill_(-1)
            else:
                to.lora_slots_N[:rows].copy_(step.lora_slots_N, non_blocking=True)
        self.pad_rows(rows, self.find_padded_size(rows))

    def pad_rows(self, rows: int, size: int) -> None:
        """Make the rows from `rows` up to `size` padding: nothing is read or kept for them."""
        if rows == size:
            return
        to = self.buffers
        to.slot_mapping_N[rows:size].fill_(PADDING_SLOT)
        to.seq_lens_R[rows:size].zero_()
        to.positions_N[rows:size].zero_()
        if to.state_rows_R is not None:
            to.state_rows_R[rows:size].fill_(-1)
        if to.lora_slots_N is not None:
            to.lora_slots_N[rows:size].fill_(-1)

    def find_padded_size(self, rows: int) -> int:
        """Return the size that a step of so many rows is padded to."""
        return self.sizes[bisect_left(self.sizes, rows)]

    def replay(self, rows: int) -> Tensor:
        """Compute what the tensors hold; the logits are overwritten by the next replay."""
        size = self.find_padded_size(rows)
        step = self._cut(size)
        graph = self._graphs.get(size)
        if graph is None:
            return self.model.forward(step)[:rows]
        graph.replay()
        assert step.logits_WV is not None, "what is captured writes its logits here"
        return step.logits_WV[:rows]

    def _cut(self, size: int) -> ForwardBatch:
        """Return the first rows of the tensors as a step."""
        of = self.buffers
        return ForwardBatch(
            tokens_N=of.tokens_N[:size],
            positions_N=of.positions_N[:size],
            slot_mapping_N=of.slot_mapping_N[:size],
            block_tables_RB=of.block_tables_RB[:size],
            seq_lens_R=of.seq_lens_R[:size],
            query_start_loc_R1=of.query_start_loc_R1[: size + 1],
            max_query_len=1,
            query_lens=(1,) * size,
            state_rows_R=None if of.state_rows_R is None else of.state_rows_R[:size],
            lora_slots_N=None if of.lora_slots_N is None else of.lora_slots_N[:size],
            logits_WV=None if self.logits_buffer is None else self.logits_buffer[:size],
        )
