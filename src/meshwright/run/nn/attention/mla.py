"""`MLASelfAttention`: multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

Products: `down` makes the latents of queries and of keys and values and the shared rotary key in
one go (rows q | kv | rope; without a query latent, `q` makes queries and `down` has kv | rope);
`q_up` and `kv_up` make heads of them. A query head lies as rope | nope, so that the rotary kernel
turns its first part in place of the whole; a row of `kv_up` lies as nope | value per head.

Shapes: B sequences, T positions, D hidden, H heads, R rotary width, E key width (rope and nope),
V value width, L latent width of keys and values, Q that of queries.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.run.kernels.attention.sdpa import AttentionBackend, attention
from meshwright.run.kernels.rotary.rotary import apply_rotary
from meshwright.run.nn.linear.linear import Linear
from meshwright.run.nn.norm import NormLayer
from meshwright.run.nn.positions import PositionInfo, compute_yarn_mscale
from meshwright.run.nn.recompute import (
    NO_RECOMPUTE,
    RecomputedFunction,
    RecomputeOpOrFull,
    drop_saved_tensors,
)
from meshwright.run.nn.sharding.parallel_hooks import (
    ParallelHooks,
    apply_input_hook,
    apply_output_hook,
)
from meshwright.spec.model import block, token_mixers


class MLASelfAttention(nn.Module):
    """Latent attention as a model's `LatentAttentionSpec` describes it."""

    def __init__(
        self,
        spec: token_mixers.LatentAttentionSpec,
        hidden: int,
        norm: block.NormSpec,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.softmax_scale = spec, compute_mla_softmax_scale(spec)
        self.recompute: frozenset[RecomputeOpOrFull] = NO_RECOMPUTE
        self.preferred_backend: AttentionBackend | None = None
        self.dynamic_shapes = False
        self.parallel_hooks: ParallelHooks | None = None
        self.core_attention: Callable[..., Tensor] | None = None
        """Where ranks share the tokens of a sequence, what attends in place of `attention`."""
        self.absorbed_attention: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        """Where latents are kept in place of keys and values, what attends: it gets turned queries,
        normed latents and turned rotary keys, and returns the values that each head reads."""
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        rms = block.NormSpec(kind="rms", eps=norm.eps)
        queries = spec.heads * (spec.nope_dim + spec.rope_dim)
        latents = spec.kv_rank + spec.rope_dim
        if spec.q_rank is None:
            self.q = Linear(hidden, queries, bias=False, **where)
        else:
            latents += spec.q_rank
            self.q_norm = NormLayer(spec.q_rank, rms, **where)
            self.q_up = Linear(spec.q_rank, queries, bias=False, **where)
        self.down = Linear(hidden, latents, bias=spec.bias, **where)
        self.kv_norm = NormLayer(spec.kv_rank, rms, **where)
        values = spec.heads * (spec.nope_dim + spec.value_dim)
        self.kv_up = Linear(spec.kv_rank, values, bias=False, **where)
        self.o = Linear(spec.heads * spec.value_dim, hidden, bias=spec.bias, **where)

    def forward(self, x_BTD: Tensor, places: PositionInfo) -> Tensor:
        """Mix the tokens of each sequence."""
        spec = self.spec
        with apply_input_hook(self.parallel_hooks, x_BTD) as inside:
            down = self.down(inside)
            if spec.q_rank is None:
                q_latent, rest = self.q(inside), down
            else:
                q_latent, rest = down.split((spec.q_rank, spec.kv_rank + spec.rope_dim), -1)
        latent, k_rope = rest.split((spec.kv_rank, spec.rope_dim), -1)
        parts = (q_latent, latent, k_rope)
        if self.absorbed_attention is not None:
            q, k_BT1R = self._turned(q_latent, k_rope, places)
            return self._out(self.absorbed_attention(q, self.kv_norm(latent), k_BT1R.squeeze(2)))
        if "mla_up_proj" not in self.recompute:
            return self._mix(*self._up(*parts, places), places)
        replay = RecomputedFunction(self._up)
        q, k, v = replay(*parts, places)
        return self._mix(q, k, v, places, replay)

    def _up(
        self, q_latent: Tensor, latent: Tensor, k_rope: Tensor, places: PositionInfo
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Make queries, keys and values of the latents."""
        spec = self.spec
        q_BTHE, k_BT1R = self._turned(q_latent, k_rope, places)
        kv = self.kv_up(self.kv_norm(latent))
        kv = kv.view(*places.shape, -1, spec.nope_dim + spec.value_dim)
        k_nope, v_BTHV = kv.split((spec.nope_dim, spec.value_dim), -1)
        k_BTHE = torch.cat((k_BT1R.expand(-1, -1, kv.shape[2], -1), k_nope), -1)
        return q_BTHE, k_BTHE, v_BTHV

    def _turned(
        self, q_latent: Tensor, k_rope: Tensor, places: PositionInfo
    ) -> tuple[Tensor, Tensor]:
        """Make queries of their latents; turn them and the rotary keys by their places."""
        spec = self.spec
        q = q_latent if spec.q_rank is None else self.q_up(self.q_norm(q_latent))
        q_BTHE = q.view(*places.shape, -1, spec.rope_dim + spec.nope_dim)
        k_BT1R = k_rope.unsqueeze(2)
        if spec.rotary is not None:
            turns = places.get_rotary(spec.rotary, spec.rope_dim)
            kind = spec.rotary.interleaved
            q_BTHE = apply_rotary(q_BTHE, turns.cos, turns.sin, interleaved=kind)
            k_BT1R = apply_rotary(k_BT1R, turns.cos, turns.sin, interleaved=kind)
        return q_BTHE, k_BT1R

    def _mix(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        places: PositionInfo,
        up: RecomputedFunction | None = None,
    ) -> Tensor:
        """Attend and project out; with `up`, what it made is dropped until backward."""
        core = RecomputedFunction(self._core) if "core_attn" in self.recompute else None
        run = self._core if core is None else core
        if up is None:
            mixed = run(q, k, v, places)
        else:
            pairs = ((made, partial(up.recompute_output, i)) for i, made in enumerate((q, k, v)))
            with drop_saved_tensors(*pairs):
                mixed = run(q, k, v, places)
        if core is None:
            return self._out(mixed)
        with drop_saved_tensors((mixed, core.recompute_output)):
            return self._out(mixed)

    def _core(self, q: Tensor, k: Tensor, v: Tensor, places: PositionInfo) -> Tensor:
        attend = attention if self.core_attention is None else self.core_attention
        return attend(
            q, k, v, causal=self.spec.causal, scale=self.softmax_scale, documents=places.documents,
            prefer=self.preferred_backend, dynamic_shapes=self.dynamic_shapes,
        )  # fmt: skip

    def _out(self, mixed_BTHV: Tensor) -> Tensor:
        return apply_output_hook(self.parallel_hooks, self.o(mixed_BTHV.flatten(2)))


def compute_mla_softmax_scale(spec: token_mixers.LatentAttentionSpec) -> float:
    """Return the multiplier of the scores: yarn's temperature, squared, grows it (DeepSeek-V2)."""
    scale: float = (spec.nope_dim + spec.rope_dim) ** -0.5
    rotary = spec.rotary
    if rotary is not None and rotary.scaling == "yarn" and rotary.mscale_all_dim:
        scale *= compute_yarn_mscale(rotary.factor, rotary.mscale_all_dim) ** 2
    return scale
