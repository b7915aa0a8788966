"""`PagedLatentAttention`: latent attention of a served model, over latents that lie in pages.

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

from meshwright.run.kernels.attention.sdpa import attention
from meshwright.run.kernels.paged_attention.kv_cache_write import write_latent_cache
from meshwright.run.kernels.paged_attention.mla_decode import paged_mla_decode, plan_mla_decode
from meshwright.run.kernels.paged_attention.paged_reference import (
    ScoreModifiers,
    paged_prefill_reference,
)
from meshwright.run.nn.attention.mla import MLASelfAttention
from meshwright.run.serve.model.kv_cache import LayerKVCache
from meshwright.run.serve.model.paged_attention import PagedLayer


@runtime_checkable
class AbsorbedProjection(Protocol):
    """What stands in place of a product that is absorbed, such as one with adapters."""

    def project_queries(self, q_NHE: Tensor, weight_HEK: Tensor, /) -> Tensor:
        """Return what queries of heads read of the latents, (N, H, L)."""

    def project_values(self, read_NHK: Tensor, weight_HVK: Tensor, /) -> Tensor:
        """Return the values of latents that heads have read, (N, H, V)."""


@dataclass(frozen=True, slots=True)
class PagedLatentAttention(PagedLayer):
    """Latent attention of one layer; `MLASelfAttention.absorbed_attention` calls it."""

    mixer: MLASelfAttention

    def __call__(self, q_1NHE: Tensor, latent_1NL: Tensor, k_1NR: Tensor) -> Tensor:
        """Store latents and rotary keys, and return what each token reads, (1, N, H, V)."""
        layer, spec = self.layer_cache, self.mixer.spec
        kept_NC = torch.cat((latent_1NL[0], k_1NR[0]), -1)
        write_latent_cache(
            kept_NC, layer.key_cache, self.forward_context.batch.slot_mapping_N, layer.key_scale
        )
        if self.forward_context.documents is not None:
            return self._whole_prompts(q_1NHE, latent_1NL, k_1NR)
        weight = self.mixer.kv_up.weight.view(-1, spec.nope_dim + spec.value_dim, spec.kv_rank)
        up_keys_HEL, up_values_HVL = weight.split((spec.nope_dim, spec.value_dim), 1)
        q_rope, q_nope = q_1NHE[0].split((spec.rope_dim, spec.nope_dim), -1)
        beside: object = (
            None if self.forward_context.lora_mask is None else self.mixer.kv_up.tp_overlap
        )
        if isinstance(beside, AbsorbedProjection):
            absorbed_NHL = beside.project_queries(q_nope, up_keys_HEL)
            read_NHL = self._read(torch.cat((absorbed_NHL, q_rope), -1), layer)
            return beside.project_values(read_NHL, up_values_HVL)[None]
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
            q_1NHE,
            k_1NHE,
            v_1NHV,
            scale=self.mixer.softmax_scale,
            documents=self.forward_context.documents,
            prefer=self.mixer.preferred_backend,
        )

    def _read(self, q_NHC: Tensor, layer: LayerKVCache) -> Tensor:
        """Return the mean of the latents that each head of each token reads, (N, H, L)."""
        step, rank, scale = (
            self.forward_context.batch,
            self.mixer.spec.kv_rank,
            self.mixer.softmax_scale,
        )
        if step.max_query_len > 1 and not self.forward_context.on_gpu:
            keys = layer.key_cache.unsqueeze(2)
            return paged_prefill_reference(
                q_NHC,
                keys,
                keys[..., :rank],
                step.block_tables_RB,
                step.seq_lens_R,
                step.query_start_loc_R1,
                ScoreModifiers(scale),
                layer.key_scale,
                layer.key_scale,
            )
        tables, lengths = step.block_tables_RB, step.seq_lens_R
        if step.max_query_len > 1:
            tables, lengths = self._rows_of_tokens()
        plan = None
        if q_NHC.is_cuda:
            plan = self.forward_context.get_decode_plan(
                "latents",
                lambda: plan_mla_decode(lengths, layer.key_cache, q_NHC.shape[1]),
            )
        return paged_mla_decode(
            q_NHC, layer.key_cache, tables, lengths, rank=rank, scale=scale,
            cache_scale=layer.key_scale, plan=plan,
        )  # fmt: skip

    def _rows_of_tokens(self) -> tuple[Tensor, Tensor]:
        """Return a table and a length for every token, as if each were the last of its row."""
        step = self.forward_context.batch
        tokens = torch.arange(
            len(step.tokens_N), dtype=torch.int32, device=step.query_start_loc_R1.device
        )
        row_N = torch.searchsorted(step.query_start_loc_R1[1:].contiguous(), tokens, right=True)
        row_N = row_N.clamp(max=len(step.seq_lens_R) - 1)
        seen_N = torch.where(step.slot_mapping_N >= 0, step.positions_N + 1, 0)
        return step.block_tables_RB.index_select(0, row_N), seen_N.to(torch.int32)
