"""`MixedStepGraphs`: steps with parts of prompts, captured for some numbers of tokens and replayed.

Launched one by one, the kernels of such a step take the host about a millisecond a layer, and the
device waits where the step is short. A graph launches all at once, but has a fixed number of
tokens, kernels and addresses. So what differs from step to step is told by numbers on the device:
how many of the first rows decode, where each part begins, which tokens are wanted. The host writes
them on one sheet, which is sent at once; the captured step reads it, and the tokens and positions
of rows that decode from where the step before left them. The output head comes after the graph,
for just as many rows as there are.

Without a GPU the same tensors are filled and padded, and the step is simply computed.

Shapes: N tokens, R rows, W wanted tokens, D hidden.
"""

# Shape suffixes name the fields.
# ruff: noqa: N815

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.policy.serving.graph_sizes import find_padded_size, list_mixed_graph_sizes
from meshwright.run.kernels.paged_attention.paged_prefill import MixedBatchCounts
from meshwright.run.serve.engine.model_input import RowChunk
from meshwright.run.serve.engine.model_runner.device_rows import DeviceRows
from meshwright.run.serve.model.forward_batch import PADDING_SLOT, ForwardBatch
from meshwright.run.serve.model.served_model import ServedModel

T = TypeVar("T", Tensor, NDArray[np.int64])


class StepDescriptor(NamedTuple, Generic[T]):
    """What is told of one step, int64; views of one line of numbers."""

    counts_2: T
    """How many of the first rows decode, and how many parts come behind them."""
    rows_R: T
    """Which row of the device each is; padding behind them."""
    seq_lens_R: T
    """Keys of the rows that do not decode, the new ones included."""
    query_start_loc_R1: T
    """Where each row's tokens begin; rows of padding begin where the last one ends."""
    logits_positions_W: T
    """Tokens whose successor is wanted; any behind them."""
    tokens_N: T
    positions_N: T
    """Those of parts; of rows that decode the device knows them."""
    rows_N: T
    """The row of the device that each token belongs to; padding behind them."""


class GraphCapacity(NamedTuple):
    """What a captured step has room for."""

    num_tokens: int
    """Tokens."""
    num_rows: int

    @property
    def field_sizes(self) -> tuple[int, ...]:
        """Numbers of each field of a sheet."""
        size, rows = self
        return (2, rows, rows, rows + 1, rows, size, size, size)


class MixedStepGraphs:
    """The captured steps of one device."""

    def __init__(
        self,
        model: ServedModel,
        device_rows: DeviceRows,
        max_tokens: int,
        *,
        uses_lora: bool = False,
    ) -> None:
        """Make the tensors that graphs read, for steps of at most so many tokens."""
        self.model, self.device_rows, self.max_tokens = model, device_rows, max_tokens
        self.uses_lora = uses_lora
        largest = self._room(max_tokens)
        whole: dict[str, Any] = {"dtype": torch.int64, "device": device_rows.device}
        self._told = torch.zeros(sum(largest.field_sizes), **whole)
        self._numbers = torch.arange(largest.num_tokens, **whole)
        self.steps = 0
        """How many were computed here."""
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(self) -> None:
        """Capture every size; does nothing without a GPU."""
        if self.device_rows.device.type != "cuda":
            return
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(list_mixed_graph_sizes(self.max_tokens)):
            room = self._room(size)
            self._tell(room, (), ())
            # The first run of a size compiles its kernels and lets libraries find their plans.
            self._compute(room)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden_WD = self._compute(room)
            self._graphs[size] = graph, hidden_WD

    def drop(self) -> None:
        """Drop the captured steps: needed when weights or the cache move."""
        self._graphs = {}

    def can_replay(self, decodes: int, parts: Sequence[RowChunk]) -> bool:
        """Tell whether a step can be replayed."""
        size = self._size(decodes, parts)
        if not size or (self.device_rows.device.type == "cuda" and size not in self._graphs):
            return False
        return all(not part.verifies_drafts and part.prompt_logprobs is None for part in parts)

    def run(self, decoding: Sequence[int], parts: Sequence[RowChunk]) -> Tensor:
        """Return what the output head reads of the wanted tokens; the next replay overwrites it."""
        size = self._size(len(decoding), parts)
        self.steps += 1
        wanted = self._tell(self._room(size), decoding, parts)
        if size not in self._graphs:
            return self._compute(self._room(size))[:wanted]
        graph, hidden_WD = self._graphs[size]
        graph.replay()
        return hidden_WD[:wanted]

    def _size(self, decodes: int, parts: Sequence[RowChunk]) -> int:
        tokens = decodes + sum(len(part.token_ids) for part in parts)
        draws = decodes + sum(len(part.sampling_rows) for part in parts)
        return find_padded_size(tokens, draws, self.max_tokens)

    def _room(self, size: int) -> GraphCapacity:
        return GraphCapacity(size, min(size, self.device_rows.padding_row))

    def _tell(self, room: GraphCapacity, decoding: Sequence[int], parts: Sequence[RowChunk]) -> int:
        """Send what is to be known of a step; return how many tokens are wanted."""
        line = np.zeros(sum(room.field_sizes), np.int64)
        sheet = _sheet(line, room)
        decodes, rows = len(decoding), len(decoding) + len(parts)
        starts = [*accumulate((len(part.token_ids) for part in parts), initial=decodes)]
        wanted = [
            end - 1 for end, part in zip(starts[1:], parts, strict=True) for _ in part.sampling_rows
        ]
        sheet.counts_2[:] = decodes, len(parts)
        sheet.rows_R[:] = sheet.rows_N[:] = self.device_rows.padding_row
        sheet.rows_R[:rows] = [*decoding, *(part.row for part in parts)]
        sheet.seq_lens_R[decodes:rows] = [
            part.start_position + len(part.token_ids) for part in parts
        ]
        sheet.query_start_loc_R1[:decodes] = sheet.logits_positions_W[:decodes] = np.arange(decodes)
        sheet.query_start_loc_R1[decodes:] = starts[-1]
        sheet.query_start_loc_R1[decodes : rows + 1] = starts
        sheet.logits_positions_W[decodes : decodes + len(wanted)] = wanted
        sheet.rows_N[:decodes] = decoding
        of_parts = flatten_chunks(parts)
        for into, each in zip(sheet[-3:], of_parts, strict=True):
            into[decodes : starts[-1]] = each
        here = torch.from_numpy(line)
        here = here.pin_memory() if self.device_rows.device.type == "cuda" else here
        self._told[: len(line)].copy_(here, non_blocking=True)
        return decodes + len(wanted)

    def _compute(self, room: GraphCapacity) -> Tensor:
        """Compute what the sheet says, and move the rows that decode on."""
        rows, told = self.device_rows, _sheet(self._told, room)
        decodes_N = self._numbers[: room.num_tokens] < told.counts_2[0]
        decodes_R = self._numbers[: room.num_rows] < told.counts_2[0]
        last_N, place_N = (
            each.index_select(0, told.rows_N) for each in (rows.last_token_ids, rows.positions)
        )
        positions_N = torch.where(decodes_N, place_N, told.positions_N)
        blocks_N = rows.block_tables[told.rows_N, positions_N // rows.block_size].to(torch.int64)
        slots_N = blocks_N * rows.block_size + positions_N % rows.block_size
        place_R = rows.positions.index_select(0, told.rows_R)
        lengths_R = torch.where(decodes_R, place_R + 1, told.seq_lens_R)
        rows.positions.index_add_(0, told.rows_R, decodes_R.to(torch.int64))
        step = ForwardBatch(
            tokens_N=torch.where(decodes_N, last_N, told.tokens_N),
            positions_N=positions_N,
            slot_mapping_N=slots_N.masked_fill(told.rows_N == rows.padding_row, PADDING_SLOT),
            block_tables_RB=rows.block_tables.index_select(0, told.rows_R),
            seq_lens_R=lengths_R.to(torch.int32),
            query_start_loc_R1=told.query_start_loc_R1.to(torch.int32),
            max_query_len=room.num_tokens,
            logits_positions_W=told.logits_positions_W,
            lora_slots_N=rows.lora_slots.index_select(0, told.rows_N) if self.uses_lora else None,
            split=MixedBatchCounts(told.counts_2.to(torch.int32), room.num_rows),
        )
        return self.model.compute_hidden_states(step)


def _sheet(line: T, room: GraphCapacity) -> StepDescriptor[T]:
    """See a line of numbers as a sheet."""
    at = [*accumulate(room.field_sizes, initial=0)]
    return StepDescriptor(*(line[begin:end] for begin, end in pairwise(at)))


def flatten_chunks(parts: Sequence[RowChunk]) -> NDArray[np.int64]:
    """Return tokens, positions and rows of parts, one behind the other, (3, N)."""
    counts = [len(part.token_ids) for part in parts]
    here = np.empty((3, sum(counts)), np.int64)
    here[2] = np.repeat(np.array([part.row for part in parts], np.int64), counts)
    end = 0
    for part, count in zip(parts, counts, strict=True):
        begin, end = end, end + count
        here[0, begin:end] = part.token_ids
        here[1, begin:end] = np.arange(part.start_position, part.start_position + count)
    return here
