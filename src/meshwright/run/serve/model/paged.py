"""How the mixers of a served model attend: store what is new in the cache, read what is there.

`Attention.across` and `LatentAttention.absorbed` call these objects in place of `attention`. They
know the layer; the step is set before every pass.

Shapes: N tokens, H query heads, K key and value heads, E head width, L latent and R rotary width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.run.kernels.attention import attention
from meshwright.run.kernels.documents import Documents
from meshwright.run.nn.latent import LatentAttention
from meshwright.run.serve.model.cache import LayerCache, PagedCache
from meshwright.run.serve.model.paged_plain import Rule, attend, attend_latents, store
from meshwright.run.serve.model.step import Step


@dataclass(slots=True)
class Now:
    """The step that is being computed; one for all layers."""

    step: Step | None = None
    documents: Documents | None = None
    """The rows of a fresh step, as documents of one sequence; made once for all layers."""

    def begin(self, step: Step) -> None:
        """Let all layers read this step from now on."""
        self.step = step
        fresh = step.fresh and step.most_queries > 1
        self.documents = Documents(step.starts_R1, step.most_queries) if fresh else None

    @property
    def current(self) -> Step:
        """The step."""
        assert self.step is not None, "a pass has to begin before its layers run"
        return self.step


@dataclass(frozen=True, slots=True)
class _Layer:
    cache: PagedCache
    number: int
    now: Now

    @property
    def _blocks(self) -> LayerCache:
        layer = self.cache.layers[self.number]
        assert layer is not None, "the layer keeps keys"
        return layer


class PagedAttention(_Layer):
    """Softmax attention of one layer."""

    def __call__(
        self,
        q_1NHE: Tensor,
        k_1NKE: Tensor,
        v_1NKE: Tensor,
        *,
        scale: float | None,
        window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi: Tensor | None = None,
        **unread: Any,
    ) -> Tensor:
        """Store keys and values, and return what each token reads."""
        step, layer = self.now.current, self._blocks
        assert layer.values is not None
        store(k_1NKE[0], layer.keys, step.slots_N, layer.key_scale)
        store(v_1NKE[0], layer.values, step.slots_N, layer.value_scale)
        if self.now.documents is not None and q_1NHE.is_cuda:
            return attention(
                q_1NHE, k_1NKE, v_1NKE, scale=scale, window=window, chunk=chunk, softcap=softcap,
                sinks=sinks, alibi=alibi, documents=self.now.documents,
                prefer=unread.get("prefer"),
            )  # fmt: skip
        scale = q_1NHE.shape[-1] ** -0.5 if scale is None else scale
        rule = Rule(
            scale=scale, window=window, chunk=chunk, softcap=softcap, sinks=sinks, alibi=alibi
        )
        return attend(q_1NHE[0], layer, step, rule)[None]


@dataclass(frozen=True, slots=True)
class PagedLatent(_Layer):
    """Latent attention of one layer, with the products that make keys and values absorbed.

    A score is q · (U c) = (Uᵀ q) · c: queries are brought to the width of the latents rather than
    the latents of all tokens to that of keys. Values in the same way, after the sum.
    """

    mixer: LatentAttention

    def __call__(self, q_1NHE: Tensor, latent_1NL: Tensor, k_1NR: Tensor) -> Tensor:
        """Store latents and rotary keys, and return what each token reads, (1, N, H, V)."""
        step, layer, spec = self.now.current, self._blocks, self.mixer.spec
        kept_NE = torch.cat((latent_1NL[0], k_1NR[0]), -1)
        store(kept_NE, layer.keys, step.slots_N, layer.key_scale)
        weight = self.mixer.kv_up.weight.view(-1, spec.nope_dim + spec.value_dim, spec.kv_rank)
        up_keys_HEL, up_values_HVL = weight.split((spec.nope_dim, spec.value_dim), 1)
        q_rope, q_nope = q_1NHE[0].split((spec.rope_dim, spec.nope_dim), -1)
        absorbed_NHL = torch.einsum("nhe,hel->nhl", q_nope, up_keys_HEL)
        q_NHE = torch.cat((absorbed_NHL, q_rope), -1)
        read_NHL = attend_latents(q_NHE, layer, step, scale=self.mixer.scale, latent=spec.kv_rank)
        return torch.einsum("nhl,hvl->nhv", read_NHL, up_values_HVL)[None]
