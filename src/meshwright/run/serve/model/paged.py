"""How the mixers of a served model attend: store what is new in the cache, read what is there.

`Attention` calls these objects in place of `attention` (`LatentAttention` those of `latent_pages`).
They know the layer; the step is set before every pass.

Shapes: N tokens, H query heads, K key and value heads, E head width, C columns of a fused product.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.run.kernels.attention import attention
from meshwright.run.kernels.documents import Documents
from meshwright.run.kernels.norm_rotate import HeadNorms
from meshwright.run.kernels.paged_decode import DecodePlan, plan_decode
from meshwright.run.kernels.paged_prefill import paged_attention
from meshwright.run.kernels.paged_store import Pages, split_store, store_kv
from meshwright.run.kernels.rotary import QkvSizes
from meshwright.run.nn.positions import Turns
from meshwright.run.serve.model.cache import LayerCache, PagedCache
from meshwright.run.serve.model.step import Step

LONG = 2048
"""Tokens of a fresh prompt from which it is read without pages. On an H200 ten prompts of 800 (16
heads of 128) took 115 µs of a layer by pages, and 182 µs by torch's kernel for such a batch."""


@dataclass(slots=True)
class Now:
    """The step that is being computed; one for all layers."""

    invariant: bool = False
    """Answers do not depend on what else is in the batch, at some cost."""
    on_gpu: bool = False
    """Compute as a GPU does it best, and ask the device nothing."""
    step: Step | None = None
    decodes: int = 0
    """How many of its first rows have few tokens, and are read by the kernel for decoding."""
    queries: int = 1
    """Tokens of each of these rows."""
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
        # One kernel for all rows: a token is computed alike as a prompt's and as an answer's.
        self.decodes, self.queries = (0, 1) if self.invariant else step.decodes
        self.adapters = None
        if step.adapters_N is not None and self.adapter_slots:
            slots = torch.arange(self.adapter_slots, device=step.adapters_N.device)
            self.adapters = step.adapters_N[:, None] == slots
        # Kernels without pages may be faster, where all keys are new.
        if step.fresh and step.most_queries > 1 and self.on_gpu and not self.invariant:
            self.documents = Documents(step.starts_R1, step.most_queries)

    @property
    def current(self) -> Step:
        """The step."""
        assert self.step is not None, "a pass has to begin before its layers run"
        return self.step

    def plan(self, kind: object, make: Callable[[], DecodePlan]) -> DecodePlan:
        """Return how rows that decode are shared out; made once for all layers of a kind."""
        if kind not in self.plans:
            self.plans[kind] = make()
        return self.plans[kind]


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One layer's place in the cache."""

    cache: PagedCache
    number: int
    now: Now

    @property
    def blocks(self) -> LayerCache:
        """What the layer keeps."""
        layer = self.cache.layers[self.number]
        assert layer is not None, "the layer keeps keys"
        return layer


class PagedAttention(PagedLayer):
    """Softmax attention of one layer."""

    @property
    def takes_product(self) -> bool:
        """Whether it cuts the fused product itself: not where fresh keys are read without pages."""
        return not self._reads_fresh

    @property
    def _reads_fresh(self) -> bool:
        """Whether all keys are new, and so many that kernels without pages are faster."""
        return self.now.documents is not None and self.now.current.most_queries >= LONG

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
        if self._reads_fresh:
            options["documents"] = self.now.documents
            return attention(q_1NHE, k_1NKE, v_1NKE, **options)
        for unread in ("documents", "prefer", "varied"):
            options.pop(unread, None)
        return self.attend(q_1NHE, **options)

    def attend(self, q_1NHE: Tensor, /, **options: Any) -> Tensor:
        """Return what each token reads of the keys and values of its row."""
        step, layer = self.now.current, self.blocks
        assert layer.values is not None, "softmax attention keeps keys and values"
        # Every layer that is served is causal.
        options.pop("causal")
        plan = self._plan(layer.keys, q_1NHE.shape[2], options["window"], options["chunk"])
        mixed = paged_attention(
            q_1NHE[0],
            layer.keys,
            layer.values,
            step.tables_RB,
            step.lengths_R,
            step.starts_R1,
            self.now.decodes if step.split is None else step.split,
            queries=self.now.queries,
            k_scale=layer.key_scale,
            v_scale=layer.value_scale,
            plan=plan,
            **options,
        )
        return mixed[None]

    def _plan(
        self, keys: Tensor, heads: int, window: int | None, chunk: int | None
    ) -> DecodePlan | None:
        now, step = self.now, self.now.current
        if not keys.is_cuda or not now.decodes:
            return None
        lengths_R = step.lengths_R[: now.decodes]
        live_1 = None if step.split is None else step.split.counts_2[:1]
        return now.plan(
            (tuple(keys.shape[1:]), heads, window, chunk),
            lambda: plan_decode(
                lengths_R, keys, heads, window=window, chunk=chunk, queries=now.queries,
                live_1=live_1,
            ),
        )  # fmt: skip

    @property
    def _pages(self) -> Pages:
        layer = self.blocks
        assert layer.values is not None, "softmax attention keeps keys and values"
        slots_N = self.now.current.slots_N
        return Pages(layer.keys, layer.values, slots_N, layer.key_scale, layer.value_scale)
