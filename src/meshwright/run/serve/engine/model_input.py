"""`ModelInput`: the work of a device in one step, as plain values for other processes.

A row is a place on the device for one answer: its table of blocks, its position, its last token and
how it draws. Orders name rows; whoever carries them out keeps no other state.
"""

import msgspec

from meshwright.run.serve.sampling_params import SamplingParams


class NewRow(msgspec.Struct, frozen=True, array_like=True):
    """An answer takes a row."""

    row: int
    sampling_params: SamplingParams
    """With a seed, so that all ranks draw the same."""
    prompt_token_ids: tuple[int, ...]
    """Read where penalties count its tokens; else empty."""
    output_token_ids: tuple[int, ...]
    """What it had written before it made room for others."""
    choice_index: int
    lora_slot: int = -1
    has_seed: bool = True
    """Whether somebody named the seed."""


class PromptLogprobsRange(msgspec.Struct, frozen=True, array_like=True):
    """How likely tokens of a prompt were is to be told."""

    offset: int
    """The first token of the part whose successor is told of."""
    target_token_ids: tuple[int, ...]
    """The successors."""
    num_top_logprobs: int
    """How many of the likeliest tokens are told beside each."""


class RowChunk(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of a row that are computed: known ones, and guesses behind its last."""

    row: int
    start_position: int
    """The position of the first of them."""
    token_ids: tuple[int, ...]
    sampling_rows: tuple[int, ...]
    """Rows that draw a token behind the last: none, the row itself, or it and its forks."""
    verifies_drafts: bool = False
    """All but the first token are guesses: the row draws behind every one of them."""
    prompt_logprobs: PromptLogprobsRange | None = None


class DecodeStart(msgspec.Struct, frozen=True, array_like=True):
    """A row decodes from this step on."""

    row: int
    position: int
    """Where its last token stands."""
    token_id: int | None = None
    """That token, where the device has not drawn it itself for this row."""


class BlockSwapIds(msgspec.Struct, frozen=True, array_like=True):
    """Blocks on their way between the device and host memory."""

    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]


class ReceivedBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Keys and values that another engine computed."""

    blocks: tuple[int, ...]
    kv_data: bytearray


class BlockTableUpdate(msgspec.Struct, frozen=True, array_like=True):
    """Blocks that are added to a row's table."""

    row: int
    column: int
    """Where in the table."""
    blocks: tuple[int, ...]


class ModelInput(msgspec.Struct, frozen=True, array_like=True):
    """One step, in the order of its fields."""

    block_copies: tuple[tuple[int, int], ...] = ()
    """Blocks and what they are copied to, as the step before left it to do."""
    swap_out: tuple[BlockSwapIds, ...] = ()
    swap_in: tuple[BlockSwapIds, ...] = ()
    received_blocks: tuple[ReceivedBlocks, ...] = ()
    new_rows: tuple[NewRow, ...] = ()
    block_table_updates: tuple[BlockTableUpdate, ...] = ()
    decode_starts: tuple[DecodeStart, ...] = ()
    decode_rows: tuple[int, ...] | None = None
    """Rows that decode, in their order; None where they are the same as in the step before."""
    chunks: tuple[RowChunk, ...] = ()
