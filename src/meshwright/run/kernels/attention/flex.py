"""Attention through torch's flex attention: a kernel compiled for soft caps, slopes and masks.

On a GPU the function is compiled once for each set of options; on a processor it runs as written,
for tests. Blocks that a mask leaves empty are skipped, so a window or documents cost what they
show.
"""

import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

from meshwright.run.kernels.attention.packed_sequences import PackedSequences

BLOCK = 128
"""Positions of a block of the mask, what flex attention's kernels are made for."""


def flex_attention(
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    documents: PackedSequences | None,
    alibi: Tensor | None,
) -> Tensor:
    """Return attention with any of the options, the mask kept in blocks."""
    batch, length, heads, _ = q_BTHE.shape
    mask = None
    if causal or window is not None or documents is not None:
        sight = AttentionMaskRule(causal, window)
        mask = make_block_mask(batch, length, q_BTHE.device, sight, documents)
    run = _compiled() if q_BTHE.is_cuda else _as_written
    out, aux = run(
        q_BTHE.transpose(1, 2),
        k_BTKE.transpose(1, 2),
        v_BTKE.transpose(1, 2),
        score_mod=_scores(softcap, alibi),
        block_mask=mask,
        scale=scale,
        enable_gqa=heads != k_BTKE.shape[2],
        return_aux=AuxRequest(lse=True),
    )
    if sinks is not None:
        lse_BHT = aux.lse
        out = out * torch.sigmoid(lse_BHT - sinks.float()[:, None])[..., None].to(out.dtype)
    result: Tensor = out.transpose(1, 2)
    return result


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., Any]:
    compiled = torch.compile(torch_flex_attention)

    def run(*args: Any, **options: Any) -> Any:
        with warnings.catch_warnings():
            # While it compiles, torch 2.11 warns of its own doings: that it looks at .grad of q, k
            # and v, and that it instantiates a class it means to abolish.
            warnings.simplefilter("ignore")
            return compiled(*args, **options)

    return run


def _as_written(*args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        # It advises compiling, which on a processor takes longer than any test.
        warnings.simplefilter("ignore")
        return torch_flex_attention(*args, **options)


def _scores(softcap: float | None, alibi: Tensor | None) -> Callable[..., Tensor] | None:
    if softcap is None and alibi is None:
        return None

    def change(score: Tensor, b: Tensor, h: Tensor, q: Tensor, s: Tensor) -> Tensor:
        del b
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if alibi is not None:
            score = score + alibi[h] * (s - q)
        return score

    return change


class AttentionMaskRule(NamedTuple):
    """What a token sees of its own sequence; positions are numbers of tokens in it."""

    causal: bool
    window: int | None

    def allows(self, token: Tensor, other: Tensor) -> Tensor:
        """Say whether a token sees another."""
        behind = token - other
        seen = behind >= 0 if self.causal else behind == behind  # noqa: PLR0124  (all true)
        if self.window is None:
            return seen
        near = behind < self.window
        return seen & (near if self.causal else near & (behind > -self.window))


def make_block_mask(
    batch: int,
    length: int,
    device: torch.device,
    sight: AttentionMaskRule,
    documents: PackedSequences | None,
) -> BlockMask:
    """Return what flex attention skips and masks; made once for a length or a batch's documents."""
    if documents is None:
        return _sequence_mask(length, device, sight)
    made, key = documents.cache, ("mask", sight)
    if key not in made:
        ids_BT = documents.ids(batch, length)

        def together(b: Tensor, h: Tensor, q: Tensor, s: Tensor) -> Tensor:
            del h
            return sight.allows(q, s) & (ids_BT[b, q] == ids_BT[b, s])

        made[key] = _blocks(together, ids_BT, sight)
    mask: BlockMask = made[key]
    return mask


@lru_cache(maxsize=32)
def _sequence_mask(length: int, device: torch.device, sight: AttentionMaskRule) -> BlockMask:
    def near(b: Tensor, h: Tensor, q: Tensor, s: Tensor) -> Tensor:
        del b, h
        return sight.allows(q, s)

    return _blocks(near, torch.zeros(1, length, dtype=torch.int64, device=device), sight)


def _blocks(sees: Callable[..., Tensor], ids_BT: Tensor, sight: AttentionMaskRule) -> BlockMask:
    """Find the blocks of the score matrix that a mask leaves, and those it leaves whole.

    torch's own `create_block_mask` looks at all T² pairs, or has to be compiled. Here two pairs of
    a block tell: documents lie in one piece and windows show what is near, so a block below the
    diagonal shows something if its nearest pair does, and everything if its farthest pair does.
    """
    length, device = ids_BT.shape[1], ids_BT.device
    first = torch.arange(0, length, BLOCK, device=device)
    last = (first + BLOCK - 1).clamp(max=length - 1)
    low = _see(first[:, None], last[None], ids_BT, sight)
    high = _see(last[:, None], first[None], ids_BT, sight)
    below, above = first[:, None] > last, last[:, None] < first
    shown = (below & low) | (above & high) | ~(below | above)
    # A block that reaches beyond the end is cut by its mask.
    inside = first + BLOCK <= length
    whole = low & high & inside[:, None] & inside
    return BlockMask.from_kv_blocks(
        *_listed(shown & ~whole),
        *_listed(whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(length, length),
    )


def _see(q: Tensor, s: Tensor, ids_BT: Tensor, sight: AttentionMaskRule) -> Tensor:
    """Say for each pair of positions whether it is seen, in each sequence."""
    return sight.allows(q, s) & (ids_BT[:, q] == ids_BT[:, s])


def _listed(blocks_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks each row of blocks has, and their numbers, those first."""
    count = blocks_BQK.sum(-1, dtype=torch.int32)
    order = blocks_BQK.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return count[:, None], order.to(torch.int32)[:, None]
