"""`PagedLatent`: latent attention of a served model, over latents that lie in pages.

The products that make keys and values are absorbed: a score is q · (U c) = (Uᵀ q) · c, so queries
are brought to the width of the latents, rather than the latents of all tokens to that of keys; and
values in the same way, after the sum. For a whole prompt it is the other way round: making keys and
values of its few latents is cheaper than wide products for every pair of tokens.

Shapes: N tokens, R rows, H query heads, E key width (rope | nope), L latent and V value width, C
width of what is kept of a token (latent | rope).
"""

# Some of torch's own methods are untyped.
# mypy: allow-untyped-calls

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from meshwright.run.kernels.attention import attention
from meshwright.run.kernels.paged_latent import paged_latent_decode, plan_latents
from meshwright.run.kernels.paged_plain import Shaping, plain_paged_prefill
from meshwright.run.kernels.paged_store import store_latent
from meshwright.run.nn.latent import LatentAttention
from meshwright.run.serve.model.cache import LayerCache
from meshwright.run.serve.model.paged import PagedLayer


@runtime_checkable
class Absorbed(Protocol):
    """What stands in place of a product that is absorbed, such as one with adapters."""

    def keys(self, q_NHE: Tensor, weight_HEK: Tensor, /) -> Tensor:
        """Return what queries of heads read of the latents, (N, H, L)."""

    def values(self, read_NHK: Tensor, weight_HVK: Tensor, /) -> Tensor:
        """Return the values of latents that heads have read, (N, H, V)."""


@dataclass(frozen=True, slots=True)
class PagedLatent(PagedLayer):
    """Latent attention of one layer; `LatentAttention.absorbed` calls it."""

    mixer: LatentAttention

    def __call__(self, q_1NHE: Tensor, latent_1NL: Tensor, k_1NR: Tensor) -> Tensor:
        """Store latents and rotary keys, and return what each token reads, (1, N, H, V)."""
        layer, spec = self.blocks, self.mixer.spec
        kept_NC = torch.cat((latent_1NL[0], k_1NR[0]), -1)
        store_latent(kept_NC, layer.keys, self.now.current.slots_N, layer.key_scale)
        if self.now.documents is not None:
            return self._whole_prompts(q_1NHE, latent_1NL, k_1NR)
        weight = self.mixer.kv_up.weight.view(-1, spec.nope_dim + spec.value_dim, spec.kv_rank)
        up_keys_HEL, up_values_HVL = weight.split((spec.nope_dim, spec.value_dim), 1)
        q_rope, q_nope = q_1NHE[0].split((spec.rope_dim, spec.nope_dim), -1)
        beside: object = None if self.now.adapters is None else self.mixer.kv_up.across
        if isinstance(beside, Absorbed):
            absorbed_NHL = beside.keys(q_nope, up_keys_HEL)
            read_NHL = self._read(torch.cat((absorbed_NHL, q_rope), -1), layer)
            return beside.values(read_NHL, up_values_HVL)[None]
        absorbed_NHL = torch.einsum("nhe,hel->nhl", q_nope, up_keys_HEL)
        read_NHL = self._read(torch.cat((absorbed_NHL, q_rope), -1), layer)
        return torch.einsum("nhl,hvl->nhv", read_NHL, up_values_HVL)[None]

    def _whole_prompts(self, q_1NHE: Tensor, latent_1NL: Tensor, k_1NR: Tensor) -> Tensor:
        """Attend over fresh keys and values, made of the latents."""
        spec = self.mixer.spec
        kv: Tensor = self.mixer.kv_up(latent_1NL).unflatten(
            -1, (-1, spec.nope_dim + spec.value_dim)
        )
        k_nope, v_1NHV = kv.split((spec.nope_dim, spec.value_dim), -1)
        k_rope = k_1NR.unsqueeze(2).expand(-1, -1, kv.shape[2], -1)
        k_1NHE = torch.cat((k_rope, k_nope), -1)
        return attention(
            q_1NHE, k_1NHE, v_1NHV, scale=self.mixer.scale, documents=self.now.documents,
            prefer=self.mixer.prefer,
        )  # fmt: skip

    def _read(self, q_NHC: Tensor, layer: LayerCache) -> Tensor:
        """Return the mean of the latents that each head of each token reads, (N, H, L)."""
        step, rank, scale = self.now.current, self.mixer.spec.kv_rank, self.mixer.scale
        if step.most_queries > 1 and not self.now.on_gpu:
            keys = layer.keys.unsqueeze(2)
            return plain_paged_prefill(
                q_NHC, keys, keys[..., :rank], step.tables_RB, step.lengths_R, step.starts_R1,
                Shaping(scale), layer.key_scale, layer.key_scale,
            )  # fmt: skip
        tables, lengths = step.tables_RB, step.lengths_R
        if step.most_queries > 1:
            tables, lengths = self._rows_of_tokens()
        plan = None
        if q_NHC.is_cuda:
            plan = self.now.plan(
                "latents",
                lambda: plan_latents(lengths, layer.keys, q_NHC.shape[1]),
            )
        return paged_latent_decode(
            q_NHC, layer.keys, tables, lengths, rank=rank, scale=scale,
            cache_scale=layer.key_scale, plan=plan,
        )  # fmt: skip

    def _rows_of_tokens(self) -> tuple[Tensor, Tensor]:
        """Return a table and a length for every token, as if each were the last of its row."""
        step = self.now.current
        tokens = torch.arange(len(step.tokens_N), dtype=torch.int32, device=step.starts_R1.device)
        row_N = torch.searchsorted(step.starts_R1[1:].contiguous(), tokens, right=True)
        row_N = row_N.clamp(max=len(step.lengths_R) - 1)
        seen_N = torch.where(step.slots_N >= 0, step.positions_N + 1, 0)
        return step.tables_RB.index_select(0, row_N), seen_N.to(torch.int32)
