"""How the mixers of a served model attend: store what is new in the cache, read what is there.

`Attention` and `LatentAttention` call these objects in place of `attention`. They know the layer;
the step is set before every pass.

Shapes: N tokens, H query heads, K key and value heads, E head width, L latent and R rotary width,
C columns of a fused product.
"""

# Some of torch's own methods are untyped.
# mypy: allow-untyped-calls

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.run.kernels.attention import attention
from meshwright.run.kernels.documents import Documents
from meshwright.run.kernels.norm_rotate import HeadNorms
from meshwright.run.kernels.paged_decode import DecodePlan, plan_decode
from meshwright.run.kernels.paged_prefill import paged_attention
from meshwright.run.kernels.paged_store import Pages, split_store, store_kv, store_latent
from meshwright.run.kernels.rotary import QkvSizes
from meshwright.run.nn.latent import LatentAttention
from meshwright.run.nn.positions import Turns
from meshwright.run.serve.model.cache import LayerCache, PagedCache
from meshwright.run.serve.model.latent_pages import attend_latents
from meshwright.run.serve.model.step import Step


@dataclass(slots=True)
class Now:
    """The step that is being computed; one for all layers."""

    invariant: bool = False
    """Answers do not depend on what else is in the batch, at some cost."""
    step: Step | None = None
    decodes: int = 0
    """How many of its first rows have a single token."""
    documents: Documents | None = None
    """The rows of a fresh step, as documents of one sequence; made once for all layers."""
    adapter_slots: int = 0
    adapters: Tensor | None = None
    """Whether a token has the adapter of a slot, (N, slots); None where no token has one."""
    plans: dict[object, DecodePlan] = field(default_factory=dict)
    """How the keys of rows that decode are shared out, by what layers of a kind have in common."""

    def begin(self, step: Step) -> None:
        """Let all layers read this step from now on."""
        self.step, self.plans, self.documents = step, {}, None
        self.decodes, self.adapters = step.decodes, None
        if step.adapters_N is not None and self.adapter_slots:
            slots = torch.arange(self.adapter_slots, device=step.adapters_N.device)
            self.adapters = step.adapters_N[:, None] == slots
        # Whole prompts on a GPU: kernels without pages are faster.
        if step.fresh and step.most_queries > 1 and step.tokens_N.is_cuda and not self.invariant:
            self.documents = Documents(step.starts_R1, step.most_queries)

    @property
    def current(self) -> Step:
        """The step."""
        assert self.step is not None, "a pass has to begin before its layers run"
        return self.step

    def plan(
        self, keys: Tensor, heads: int, window: int | None, chunk: int | None
    ) -> DecodePlan | None:
        """Return how rows that decode are shared out; made once for all layers that are alike."""
        step = self.current
        if not keys.is_cuda or not self.decodes:
            return None
        kind = (tuple(keys.shape[1:]), heads, window, chunk)
        if kind not in self.plans:
            self.plans[kind] = plan_decode(
                step.lengths_R[: self.decodes], keys, heads, window=window, chunk=chunk,
                invariant=self.invariant,
            )  # fmt: skip
        return self.plans[kind]


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

    @property
    def takes_product(self) -> bool:
        """Whether it cuts the fused product itself: not where fresh keys are read without pages."""
        return self.now.documents is None

    def store(
        self,
        qkv_1NC: Tensor,
        sizes: QkvSizes,
        turns: Turns,
        norms: HeadNorms | None,
        *,
        interleaved: bool,
    ) -> Tensor:
        """Cut a product; norm and turn its heads; keep keys and values, return queries."""
        angles = (turns.cos, turns.sin)
        q_NHE = split_store(qkv_1NC[0], sizes, angles, self._pages, norms, interleaved=interleaved)
        return q_NHE[None]

    def __call__(self, q_1NHE: Tensor, k_1NKE: Tensor, v_1NKE: Tensor, **options: Any) -> Tensor:
        """Store keys and values, and return what each token reads."""
        store_kv(k_1NKE[0], v_1NKE[0], self._pages)
        if self.now.documents is not None:
            options["documents"] = self.now.documents
            return attention(q_1NHE, k_1NKE, v_1NKE, **options)
        for unread in ("documents", "prefer"):
            options.pop(unread, None)
        return self.attend(q_1NHE, **options)

    def attend(self, q_1NHE: Tensor, **options: Any) -> Tensor:
        """Return what each token reads of the keys and values of its row."""
        step, layer = self.now.current, self._blocks
        assert layer.values is not None, "softmax attention keeps keys and values"
        # Every layer that is served is causal.
        options.pop("causal")
        plan = self.now.plan(layer.keys, q_1NHE.shape[2], options["window"], options["chunk"])
        mixed = paged_attention(
            q_1NHE[0],
            layer.keys,
            layer.values,
            step.tables_RB,
            step.lengths_R,
            step.starts_R1,
            self.now.decodes,
            k_scale=layer.key_scale,
            v_scale=layer.value_scale,
            plan=plan,
            invariant=self.now.invariant,
            **options,
        )
        return mixed[None]

    @property
    def _pages(self) -> Pages:
        layer = self._blocks
        assert layer.values is not None, "softmax attention keeps keys and values"
        slots_N = self.now.current.slots_N
        return Pages(layer.keys, layer.values, slots_N, layer.key_scale, layer.value_scale)


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
        store_latent(kept_NE, layer.keys, step.slots_N, layer.key_scale)
        weight = self.mixer.kv_up.weight.view(-1, spec.nope_dim + spec.value_dim, spec.kv_rank)
        up_keys_HEL, up_values_HVL = weight.split((spec.nope_dim, spec.value_dim), 1)
        q_rope, q_nope = q_1NHE[0].split((spec.rope_dim, spec.nope_dim), -1)
        absorbed_NHL = torch.einsum("nhe,hel->nhl", q_nope, up_keys_HEL)
        q_NHE = torch.cat((absorbed_NHL, q_rope), -1)
        read_NHL = attend_latents(q_NHE, layer, step, scale=self.mixer.scale, latent=spec.kv_rank)
        return torch.einsum("nhl,hvl->nhv", read_NHL, up_values_HVL)[None]
