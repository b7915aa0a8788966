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

from meshwright.run.serve.engine.model_runner.decode_inputs import RowTensors, gather_decode_inputs
from meshwright.run.serve.model.forward_batch import ForwardBatch
from meshwright.run.serve.model.served_model import ServedModel


class DeviceRows:
    """The rows of one device."""

    def __init__(self, rows: int, table_blocks: int, block_size: int, device: torch.device):
        self.padding_row, self.block_size, self.device = rows, block_size, device
        whole: dict[str, Any] = {"dtype": torch.int64, "device": device}
        self.last_token_ids = torch.zeros(rows + 1, **whole)
        """The token that was drawn last."""
        self.positions = torch.zeros(rows + 1, **whole)
        """Where it stands."""
        self.block_tables = torch.zeros(rows + 1, table_blocks, dtype=torch.int32, device=device)
        self.lora_slots = torch.full((rows + 1,), -1, **whole)
        self.decode_rows = torch.full((rows,), rows, **whole)
        """Rows that decode; padding behind them."""

    def to_device(
        self, values: Sequence[int] | NDArray[np.int64], dtype: torch.dtype = torch.int64
    ) -> Tensor:
        """Return numbers of the host on the device, without waiting for it."""
        here = torch.as_tensor(values, dtype=dtype)
        if self.device.type != "cuda":
            return here
        return here.pin_memory().to(self.device, non_blocking=True)

    def set_blocks(self, rows: Sequence[int], places: Sequence[int], blocks: Sequence[int]) -> None:
        """Put blocks into places of the tables of rows."""
        where = self.to_device([*rows, *places, *blocks]).view(3, -1)
        self.block_tables[where[0], where[1]] = where[2].to(torch.int32)

    def set_positions(self, rows: Sequence[int], positions: Sequence[int]) -> None:
        """Say where the last tokens of rows stand."""
        pair = self.to_device([*rows, *positions]).view(2, -1)
        self.positions[pair[0]] = pair[1]

    def set_last_tokens(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Say which tokens of rows are the last."""
        pair = self.to_device([*rows, *tokens]).view(2, -1)
        self.last_token_ids[pair[0]] = pair[1]

    def set_lora(self, rows: Sequence[int], adapters: Sequence[int]) -> None:
        """Say which adapters rows have; -1 is none."""
        pair = self.to_device([*rows, *adapters]).view(2, -1)
        self.lora_slots[pair[0]] = pair[1]

    def set_decode_rows(self, rows: Sequence[int]) -> None:
        """Let these rows decode, in this order."""
        if rows:
            self.decode_rows[: len(rows)].copy_(self.to_device(rows))
        self.decode_rows[len(rows) :].fill_(self.padding_row)

    def prepare_decode(self, rows_R: Tensor, into: ForwardBatch) -> None:
        """Write what rows read in their next step into its tensors, and move these rows on."""
        held = RowTensors(self.last_token_ids, self.positions, self.block_tables, self.lora_slots)
        gather_decode_inputs(rows_R, held, into, self.block_size)


class DecodeStep:
    """A step of all rows that decode, inputs included: what `DecodeGraphs` captures."""

    def __init__(self, model: ServedModel, device_rows: DeviceRows) -> None:
        self.model, self.device_rows = model, device_rows
        self.kv_cache, self.max_model_len = model.kv_cache, model.max_model_len

    def forward(self, step: ForwardBatch) -> Tensor:
        """Fill the step's tensors, move its rows on, and compute it."""
        self.device_rows.prepare_decode(self.device_rows.decode_rows[: len(step.tokens_N)], step)
        return self.model.forward(step)
