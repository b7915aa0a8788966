"""`MixedSteps`: steps with parts of prompts, captured for some numbers of tokens and replayed.

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

from meshwright.policy.captured import captured_size, captured_sizes
from meshwright.run.kernels.paged_prefill import Split
from meshwright.run.serve.engine.device_rows import DeviceRows
from meshwright.run.serve.engine.orders import Part
from meshwright.run.serve.model.forward import Forward
from meshwright.run.serve.model.step import NOWHERE, Step

T = TypeVar("T", Tensor, NDArray[np.int64])


class Sheet(NamedTuple, Generic[T]):
    """What is told of one step, int64; views of one line of numbers."""

    counts_2: T
    """How many of the first rows decode, and how many parts come behind them."""
    rows_R: T
    """Which row of the device each is; padding behind them."""
    lengths_R: T
    """Keys of the rows that do not decode, the new ones included."""
    starts_R1: T
    """Where each row's tokens begin; rows of padding begin where the last one ends."""
    wanted_W: T
    """Tokens whose successor is wanted; any behind them."""
    tokens_N: T
    positions_N: T
    """Those of parts; of rows that decode the device knows them."""
    rows_N: T
    """The row of the device that each token belongs to; padding behind them."""


class Room(NamedTuple):
    """What a captured step has room for."""

    size: int
    """Tokens."""
    rows: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of each field of a sheet."""
        size, rows = self
        return (2, rows, rows, rows + 1, rows, size, size, size)


class MixedSteps:
    """The captured steps of one device."""

    def __init__(
        self, forward: Forward, rows: DeviceRows, most_tokens: int, *, adapters: bool = False
    ) -> None:
        """Make the tensors that graphs read, for steps of at most so many tokens."""
        self.forward, self.rows, self.most_tokens = forward, rows, most_tokens
        self.adapters = adapters
        largest = self._room(most_tokens)
        whole: dict[str, Any] = {"dtype": torch.int64, "device": rows.device}
        self._told = torch.zeros(sum(largest.counts), **whole)
        self._numbers = torch.arange(largest.size, **whole)
        self.steps = 0
        """How many were computed here."""
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def capture(self) -> None:
        """Capture every size; does nothing without a GPU."""
        if self.rows.device.type != "cuda":
            return
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(captured_sizes(self.most_tokens)):
            room = self._room(size)
            self._tell(room, (), ())
            # The first run of a size compiles its kernels and lets libraries find their plans.
            self._compute(room)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                hidden_WD = self._compute(room)
            self._graphs[size] = graph, hidden_WD

    def forget(self) -> None:
        """Drop the captured steps: needed when weights or the cache move."""
        self._graphs = {}

    def covers(self, decodes: int, parts: Sequence[Part]) -> bool:
        """Tell whether a step can be replayed."""
        size = self._size(decodes, parts)
        if not size or (self.rows.device.type == "cuda" and size not in self._graphs):
            return False
        return all(not part.checks and part.telling is None for part in parts)

    def run(self, decoding: Sequence[int], parts: Sequence[Part]) -> Tensor:
        """Return what the output head reads of the wanted tokens; the next replay overwrites it."""
        size = self._size(len(decoding), parts)
        self.steps += 1
        wanted = self._tell(self._room(size), decoding, parts)
        if size not in self._graphs:
            return self._compute(self._room(size))[:wanted]
        graph, hidden_WD = self._graphs[size]
        graph.replay()
        return hidden_WD[:wanted]

    def _size(self, decodes: int, parts: Sequence[Part]) -> int:
        tokens = decodes + sum(len(part.tokens) for part in parts)
        draws = decodes + sum(len(part.draws) for part in parts)
        return captured_size(tokens, draws, self.most_tokens)

    def _room(self, size: int) -> Room:
        return Room(size, min(size, self.rows.padding))

    def _tell(self, room: Room, decoding: Sequence[int], parts: Sequence[Part]) -> int:
        """Send what is to be known of a step; return how many tokens are wanted."""
        line = np.zeros(sum(room.counts), np.int64)
        sheet = _sheet(line, room)
        decodes, rows = len(decoding), len(decoding) + len(parts)
        starts = [*accumulate((len(part.tokens) for part in parts), initial=decodes)]
        wanted = [end - 1 for end, part in zip(starts[1:], parts, strict=True) for _ in part.draws]
        sheet.counts_2[:] = decodes, len(parts)
        sheet.rows_R[:] = sheet.rows_N[:] = self.rows.padding
        sheet.rows_R[:rows] = [*decoding, *(part.row for part in parts)]
        sheet.lengths_R[decodes:rows] = [part.begin + len(part.tokens) for part in parts]
        sheet.starts_R1[:decodes] = sheet.wanted_W[:decodes] = np.arange(decodes)
        sheet.starts_R1[decodes:] = starts[-1]
        sheet.starts_R1[decodes : rows + 1] = starts
        sheet.wanted_W[decodes : decodes + len(wanted)] = wanted
        sheet.rows_N[:decodes] = decoding
        of_parts = lay_out(parts)
        for into, each in zip(sheet[-3:], of_parts, strict=True):
            into[decodes : starts[-1]] = each
        here = torch.from_numpy(line)
        here = here.pin_memory() if self.rows.device.type == "cuda" else here
        self._told[: len(line)].copy_(here, non_blocking=True)
        return decodes + len(wanted)

    def _compute(self, room: Room) -> Tensor:
        """Compute what the sheet says, and move the rows that decode on."""
        rows, told = self.rows, _sheet(self._told, room)
        decodes_N = self._numbers[: room.size] < told.counts_2[0]
        decodes_R = self._numbers[: room.rows] < told.counts_2[0]
        last_N, place_N = (each.index_select(0, told.rows_N) for each in (rows.last, rows.position))
        positions_N = torch.where(decodes_N, place_N, told.positions_N)
        blocks_N = rows.tables[told.rows_N, positions_N // rows.block_tokens].to(torch.int64)
        slots_N = blocks_N * rows.block_tokens + positions_N % rows.block_tokens
        place_R = rows.position.index_select(0, told.rows_R)
        lengths_R = torch.where(decodes_R, place_R + 1, told.lengths_R)
        rows.position.index_add_(0, told.rows_R, decodes_R.to(torch.int64))
        step = Step(
            tokens_N=torch.where(decodes_N, last_N, told.tokens_N),
            positions_N=positions_N,
            slots_N=slots_N.masked_fill(told.rows_N == rows.padding, NOWHERE),
            tables_RB=rows.tables.index_select(0, told.rows_R),
            lengths_R=lengths_R.to(torch.int32),
            starts_R1=told.starts_R1.to(torch.int32),
            most_queries=room.size,
            wanted_W=told.wanted_W,
            adapters_N=rows.adapter.index_select(0, told.rows_N) if self.adapters else None,
            split=Split(told.counts_2.to(torch.int32), room.rows),
        )
        return self.forward.hidden(step)


def _sheet(line: T, room: Room) -> Sheet[T]:
    """See a line of numbers as a sheet."""
    at = [*accumulate(room.counts, initial=0)]
    return Sheet(*(line[begin:end] for begin, end in pairwise(at)))


def lay_out(parts: Sequence[Part]) -> NDArray[np.int64]:
    """Return tokens, positions and rows of parts, one behind the other, (3, N)."""
    counts = [len(part.tokens) for part in parts]
    here = np.empty((3, sum(counts)), np.int64)
    here[2] = np.repeat(np.array([part.row for part in parts], np.int64), counts)
    end = 0
    for part, count in zip(parts, counts, strict=True):
        begin, end = end, end + count
        here[0, begin:end] = part.tokens
        here[1, begin:end] = np.arange(part.begin, part.begin + count)
    return here
