"""`ForwardBatch`: inputs of one forward pass: tokens of many sequences in one flat batch.

Every row is one sequence with some new tokens at its end: a part of its prompt, or the one token
that was chosen last. What came before lies in the blocks of the cache.

Shapes: N tokens, R rows, B blocks of the longest table, W positions whose logits are wanted, V
vocabulary.
"""

# Shape suffixes name the fields.
# ruff: noqa: N815

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.run.kernels.paged_attention.paged_prefill import MixedBatchCounts

PADDING_SLOT = -1
"""The slot of a token whose keys and values are kept nowhere."""
MAX_DECODE_QUERIES = 8
"""Tokens of a row up to which it is read like one that decodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """The tokens of one pass, and where they stand. All tensors lie on the model's device."""

    tokens_N: Tensor
    """int64: the new tokens, row after row."""
    positions_N: Tensor
    """int64: the place of each in its sequence."""
    slot_mapping_N: Tensor
    """int64: block · tokens of a block + offset, where its keys and values go; -1 for padding."""
    block_tables_RB: Tensor
    """int32: the blocks of each row; entries behind its last block are never read."""
    seq_lens_R: Tensor
    """int32: keys of each row, the new ones included; 0 for a row of padding."""
    query_start_loc_R1: Tensor
    """int32: row r's tokens are starts[r] up to starts[r + 1], the last of its `lengths[r]`."""
    max_query_len: int
    """An upper bound of the tokens of a row; with 1, every row has exactly one."""
    logits_positions_W: Tensor | None = None
    """int64: tokens whose successor is wanted, by their place in the batch; None wants all."""
    has_no_cached_prefix: bool = False
    """Every row begins at its first token, so that nothing in the cache has to be read."""
    query_lens: tuple[int, ...] | None = None
    """Tokens of each row where the host knows them; saves asking the device."""
    state_rows_R: Tensor | None = None
    """int64: where a row's recurrent state is kept, for models that have one."""
    lora_slots_N: Tensor | None = None
    """int64: the adapter of each token, -1 for none; None where no token has one."""
    logits_WV: Tensor | None = None
    """Where the logits are written; None makes room for them."""
    split: MixedBatchCounts | None = None
    """How many of the first rows decode, where only the device knows: in a captured step."""

    @property
    def uniform_decode_shape(self) -> tuple[int, int]:
        """How many of the first rows have equally few tokens, and how many these are.

        Rows that decode have one, or a few where guesses are checked.
        """
        if self.split is not None:
            return self.split.num_decodes, 1
        if self.max_query_len == 1:
            return len(self.seq_lens_R), 1
        counts = self.query_lens or (MAX_DECODE_QUERIES + 1,)
        first = counts[0]
        if not 0 < first <= MAX_DECODE_QUERIES:
            return 0, 1
        equal = (row for row, count in enumerate(counts) if count != first)
        return next(equal, len(counts)), first

    def get_query_lens(self) -> tuple[int, ...]:
        """Return the tokens of each row, asking the device where the host does not know."""
        if self.query_lens is not None:
            return self.query_lens
        return tuple(torch.diff(self.query_start_loc_R1).tolist())


class BatchRow(NamedTuple):
    """One sequence's part of a step."""

    tokens: Sequence[int]
    """The new tokens."""
    start_position: int
    """The position of the first of them."""
    blocks: Sequence[int]
    """Blocks of the whole sequence, the new tokens included."""
    state_row: int = 0
    """Where its recurrent state is kept."""
    lora_slot: int = -1


def build_forward_batch(
    rows: Sequence[BatchRow],
    block_tokens: int,
    device: torch.device | str = "cpu",
    *,
    all_wanted: bool = False,
) -> ForwardBatch:
    """Lay rows one behind the other; wanted is the last token of each, or every token."""
    positions = [row.start_position + step for row in rows for step in range(len(row.tokens))]
    slots = [
        row.blocks[place // block_tokens] * block_tokens + place % block_tokens
        for row in rows
        for place in range(row.start_position, row.start_position + len(row.tokens))
    ]
    counts = tuple(len(row.tokens) for row in rows)
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    most = max(len(row.blocks) for row in rows)
    tables = [[*row.blocks, *[0] * (most - len(row.blocks))] for row in rows]

    def whole(values: Sequence[object], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    adapters = [row.lora_slot for row in rows for _ in row.tokens]
    return ForwardBatch(
        tokens_N=whole([token for row in rows for token in row.tokens]),
        positions_N=whole(positions),
        slot_mapping_N=whole(slots),
        block_tables_RB=whole(tables, torch.int32),
        seq_lens_R=whole([row.start_position + len(row.tokens) for row in rows], torch.int32),
        query_start_loc_R1=whole(starts, torch.int32),
        max_query_len=max(counts),
        logits_positions_W=None
        if all_wanted or max(counts) == 1
        else whole([end - 1 for end in starts[1:]]),
        has_no_cached_prefix=all(row.start_position == 0 for row in rows),
        query_lens=counts,
        state_rows_R=whole([row.state_row for row in rows]),
        lora_slots_N=whole(adapters) if any(each >= 0 for each in adapters) else None,
    )
