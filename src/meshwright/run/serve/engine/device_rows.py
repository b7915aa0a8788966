"""`DeviceRows`: what a device knows of its rows, so that a step of decoding asks the host nothing.

Each row has its last token, that token's position, and its table of blocks. A step that decodes
reads its inputs from here by the numbers of the rows, and moves them on. One row more than there
are answers is padding: nothing is stored for it.

Shapes: R rows that decode, B blocks of the longest table.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from meshwright.run.serve.engine.row_inputs import Held, read_rows
from meshwright.run.serve.model.forward import Forward
from meshwright.run.serve.model.step import Step


class DeviceRows:
    """The rows of one device."""

    def __init__(self, rows: int, table_blocks: int, block_tokens: int, device: torch.device):
        self.padding, self.block_tokens, self.device = rows, block_tokens, device
        whole: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self.last = torch.zeros(rows + 1, **whole)
        """The token that was drawn last."""
        self.position = torch.zeros(rows + 1, **whole)
        """Where it stands."""
        self.tables = torch.zeros(rows + 1, table_blocks, dtype=torch.int32, device=device)
        self.adapter = torch.full((rows + 1,), -1, **whole)
        self.decoding = torch.full((rows,), rows, **whole)
        """Rows that decode; padding behind them."""

    def sent(
        self, values: Sequence[int] | NDArray[np.int64], dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """Return numbers of the host on the device, without waiting for it."""
        here = torch.as_tensor(values, dtype=dtype)
        if self.device.type != "cuda":
            return here
        return here.pin_memory().to(self.device, non_blocking=True)

    def write(self, rows: Sequence[int], places: Sequence[int], blocks: Sequence[int]) -> None:
        """Put blocks into places of the tables of rows."""
        where = self.sent([*rows, *places, *blocks]).view(3, -1)
        self.tables[where[0], where[1]] = where[2].to(torch.int32)

    def start(self, rows: Sequence[int], positions: Sequence[int]) -> None:
        """Say where the last tokens of rows stand."""
        pair = self.sent([*rows, *positions]).view(2, -1)
        self.position[pair[0]] = pair[1]

    def give(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Say which tokens of rows are the last."""
        pair = self.sent([*rows, *tokens]).view(2, -1)
        self.last[pair[0]] = pair[1]

    def choose(self, rows: Sequence[int], adapters: Sequence[int]) -> None:
        """Say which adapters rows have; -1 is none."""
        pair = self.sent([*rows, *adapters]).view(2, -1)
        self.adapter[pair[0]] = pair[1]

    def decode(self, rows: Sequence[int]) -> None:
        """Let these rows decode, in this order."""
        if rows:
            self.decoding[: len(rows)].copy_(self.sent(rows))
        self.decoding[len(rows) :].fill_(self.padding)

    def read(self, rows_R: Tensor, into: Step) -> None:
        """Write what rows read in their next step into its tensors, and move these rows on."""
        held = Held(self.last, self.position, self.tables, self.adapter)
        read_rows(rows_R, held, into, self.block_tokens)


class DecodeForward:
    """A step of all rows that decode, inputs included: what `Graphs` captures."""

    def __init__(self, forward: Forward, rows: DeviceRows) -> None:
        self.forward, self.rows = forward, rows
        self.cache, self.max_length = forward.cache, forward.max_length

    def run(self, step: Step) -> Tensor:
        """Fill the step's tensors, move its rows on, and compute it."""
        self.rows.read(self.rows.decoding[: len(step.tokens_N)], step)
        return self.forward.run(step)
