"""`gather_decode_inputs`: what rows that decode read next, gathered by one kernel.

By torch these are a dozen small kernels, which take a fifteenth of a step of a small model.

Letters: R rows that decode, B blocks of the longest table.
"""

# Triton compiles the kernel itself: its arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.run.kernels.triton_compat import (
    KernelBackend,
    make_pdl_launch_options,
    should_use_triton,
    tl,
    triton,
    wait_for_inputs,
)
from meshwright.run.serve.model.forward_batch import PADDING_SLOT, ForwardBatch

_COLUMNS = 256
"""Blocks that are copied at a time."""
_NOWHERE = tl.constexpr(PADDING_SLOT)


class RowTensors(NamedTuple):
    """What a device knows of its rows; the last one is padding."""

    last_token_ids: Tensor
    """The token that was drawn last, int64."""
    positions: Tensor
    """Where it stands, int64."""
    block_tables: Tensor
    """Blocks of each row, int32."""
    lora_slots: Tensor
    """Which adapter it has, int64; -1 is none."""


def gather_decode_inputs(
    rows_R: Tensor,
    held: RowTensors,
    into: ForwardBatch,
    block_tokens: int,
    *,
    backend: KernelBackend = "auto",
) -> None:
    """Write what rows read in their next step into its tensors, and move these rows on.

    Rows are there once each, padding as often as need be: nothing is stored for it.
    """
    if not should_use_triton(backend, rows_R):
        _reference(rows_R, held, into, block_tokens)
        return
    _read[(len(rows_R),)](
        rows_R, *held, into.tokens_N, into.positions_N, into.slot_mapping_N, into.block_tables_RB,
        into.seq_lens_R, into.state_rows_R, into.lora_slots_N, len(held.last_token_ids) - 1,
        held.block_tables.shape[1],
        held.block_tables.stride(0), into.block_tables_RB.stride(0),
        BLOCK=block_tokens, COLUMNS=_COLUMNS, num_warps=2, **make_pdl_launch_options(rows_R),
    )  # fmt: skip


def _reference(rows_R: Tensor, held: RowTensors, into: ForwardBatch, block_tokens: int) -> None:
    position_R = held.positions.index_select(0, rows_R)
    there_R = rows_R != len(held.last_token_ids) - 1
    tables_RB = held.block_tables.index_select(0, rows_R)
    block_R = tables_RB.gather(1, (position_R // block_tokens)[:, None])[:, 0]
    slot_R = block_R.to(torch.int64) * block_tokens + position_R % block_tokens
    into.tokens_N.copy_(held.last_token_ids.index_select(0, rows_R))
    into.positions_N.copy_(position_R)
    into.slot_mapping_N.copy_(torch.where(there_R, slot_R, PADDING_SLOT))
    into.block_tables_RB.copy_(tables_RB)
    into.seq_lens_R.copy_(torch.where(there_R, position_R + 1, 0))
    if into.state_rows_R is not None:
        into.state_rows_R.copy_(torch.where(there_R, rows_R, -1))
    if into.lora_slots_N is not None:
        into.lora_slots_N.copy_(held.lora_slots.index_select(0, rows_R))
    held.positions.index_add_(0, rows_R, there_R.to(torch.int64))


@triton.jit(do_not_specialize=["padding", "blocks"])
def _read(
    rows,
    last,
    position,
    tables,
    adapter,
    tokens,
    positions,
    slots,
    into,
    lengths,
    states,
    adapters,
    padding,
    blocks,
    table_row,
    into_row,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_inputs(PDL)
    number = tl.program_id(0)
    row = tl.load(rows + number)
    there = row != padding
    place = tl.load(position + row)
    table = tables + row * table_row
    block = tl.load(table + place // BLOCK).to(tl.int64)
    tl.store(tokens + number, tl.load(last + row))
    tl.store(positions + number, place)
    tl.store(slots + number, tl.where(there, block * BLOCK + place % BLOCK, _NOWHERE))
    tl.store(lengths + number, tl.where(there, place + 1, 0).to(tl.int32))
    if states is not None:
        tl.store(states + number, tl.where(there, row, -1))
    if adapters is not None:
        tl.store(adapters + number, tl.load(adapter + row))
    for start in range(0, blocks, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        held = tl.load(table + column, mask=column < blocks, other=0)
        tl.store(into + number.to(tl.int64) * into_row + column, held, mask=column < blocks)
    tl.store(position + row, place + 1, mask=there)
