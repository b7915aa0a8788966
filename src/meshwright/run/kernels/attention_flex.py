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
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from meshwright.run.kernels.documents import Documents


def flexible_attention(
    q_BTHE: Tensor,
    k_BTKE: Tensor,
    v_BTKE: Tensor,
    *,
    causal: bool,
    window: int | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    documents: Documents | None,
    alibi: Tensor | None,
) -> Tensor:
    """Return attention with any of the options, the mask kept in blocks."""
    batch, length, heads, _ = q_BTHE.shape
    mask = None
    if causal or window is not None or documents is not None:
        sight = _Sight(causal, window)
        mask = _mask(batch, length, q_BTHE.device, sight, documents)
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
    return torch.compile(flex_attention)


def _as_written(*args: Any, **options: Any) -> Any:
    with warnings.catch_warnings():
        # It advises compiling, which on a processor takes longer than any test.
        warnings.simplefilter("ignore")
        return flex_attention(*args, **options)


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


class _Sight(NamedTuple):
    """What a token sees of its own sequence; positions are numbers of tokens in it."""

    causal: bool
    window: int | None

    def sees(self, token: Tensor, other: Tensor) -> Tensor:
        """Say whether a token sees another."""
        behind = token - other
        seen = behind >= 0 if self.causal else behind == behind  # noqa: PLR0124  (all true)
        if self.window is None:
            return seen
        near = behind < self.window
        return seen & (near if self.causal else near & (behind > -self.window))


def _mask(
    batch: int, length: int, device: torch.device, sight: _Sight, documents: Documents | None
) -> Any:
    if documents is None:
        return _sequence_mask(length, device, sight)
    made, key = documents.made, ("mask", sight)
    if key not in made:
        ids = documents.ids(batch, length)

        def together(b: Tensor, h: Tensor, q: Tensor, s: Tensor) -> Tensor:
            del h
            return sight.sees(q, s) & (ids[b, q] == ids[b, s])

        made[key] = _blocks(together, batch, length, device)
    return made[key]


@lru_cache(maxsize=32)
def _sequence_mask(length: int, device: torch.device, sight: _Sight) -> Any:
    def near(b: Tensor, h: Tensor, q: Tensor, s: Tensor) -> Tensor:
        del b, h
        return sight.sees(q, s)

    return _blocks(near, None, length, device)


def _blocks(
    sees: Callable[..., Tensor], batch: int | None, length: int, device: torch.device
) -> Any:
    """Find the blocks a mask leaves; compiled, as otherwise it holds all T² answers."""
    make = _compiled_mask() if device.type == "cuda" else create_block_mask
    return make(sees, batch, None, length, length, device=str(device))


@lru_cache(maxsize=1)
def _compiled_mask() -> Callable[..., Any]:
    return torch.compile(create_block_mask)
