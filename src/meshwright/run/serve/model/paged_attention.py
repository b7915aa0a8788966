"""How the mixers of a served model attend: store what is new in the cache, read what is there.

`SelfAttention` calls these objects in place of `attention`, `MLASelfAttention` those of
`model.mla_attention`. They know the layer; the step is set before every pass.

Shapes: N tokens, H query heads, K key and value heads, E head width, C columns of a fused product.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.kernels.attention.sdpa import attention
from meshwright.run.kernels.paged_attention.kv_cache_write import (
    KVCachePages,
    rope_and_write_kv,
    write_kv_cache,
)
from meshwright.run.kernels.paged_attention.paged_decode import DecodePlan, plan_decode
from meshwright.run.kernels.paged_attention.paged_prefill import paged_attention
from meshwright.run.kernels.rotary.qk_norm_rope import QKNorms
from meshwright.run.kernels.rotary.rotary import QKVSizes
from meshwright.run.nn.positions import RotaryCosSin
from meshwright.run.serve.model.forward_batch import ForwardBatch
from meshwright.run.serve.model.kv_cache import LayerKVCache, PagedKVCache

LONG_PREFILL = 2048
"""Tokens of a fresh prompt from which it is read without pages. On an H200 ten prompts of 800 (16
heads of 128) took 115 µs of a layer by pages, and 182 µs by torch's kernel for such a batch."""


@dataclass(slots=True)
class ForwardContext:
    """The step that is being computed; one for all layers."""

    batch_invariant: bool = False
    """Answers do not depend on what else is in the batch, at some cost."""
    on_gpu: bool = False
    """Compute as a GPU does it best, and ask the device nothing."""
    current_batch: ForwardBatch | None = None
    num_decode_rows: int = 0
    """How many of its first rows have few tokens, and are read by the kernel for decoding."""
    decode_query_len: int = 1
    """Tokens of each of these rows."""
    documents: PackedSequences | None = None
    """The rows of a fresh step, as documents of one sequence; made once for all layers."""
    num_lora_slots: int = 0
    lora_mask: Tensor | None = None
    """Whether a token has the adapter of a slot, (N, slots); None where no token has one."""
    decode_plans: dict[object, DecodePlan] = field(default_factory=dict)
    """How the keys of rows that decode are shared out, by what layers of a kind have in common."""

    def set_batch(self, step: ForwardBatch) -> None:
        """Let all layers read this step from now on."""
        self.current_batch, self.decode_plans, self.documents = step, {}, None
        # One kernel for all rows: a token is computed alike as a prompt's and as an answer's.
        self.num_decode_rows, self.decode_query_len = (
            (0, 1) if self.batch_invariant else step.uniform_decode_shape
        )
        self.lora_mask = None
        if step.lora_slots_N is not None and self.num_lora_slots:
            slots = torch.arange(self.num_lora_slots, device=step.lora_slots_N.device)
            self.lora_mask = step.lora_slots_N[:, None] == slots
        # Kernels without pages may be faster, where all keys are new.
        if (
            step.has_no_cached_prefix
            and step.max_query_len > 1
            and self.on_gpu
            and not self.batch_invariant
        ):
            self.documents = PackedSequences(step.query_start_loc_R1, step.max_query_len)

    @property
    def batch(self) -> ForwardBatch:
        """The step."""
        assert self.current_batch is not None, "a pass has to begin before its layers run"
        return self.current_batch

    def get_decode_plan(self, kind: object, make: Callable[[], DecodePlan]) -> DecodePlan:
        """Return how rows that decode are shared out; made once for all layers of a kind."""
        if kind not in self.decode_plans:
            self.decode_plans[kind] = make()
        return self.decode_plans[kind]


@dataclass(frozen=True, slots=True)
class PagedLayer:
    """One layer's place in the cache."""

    kv_cache: PagedKVCache
    layer_index: int
    forward_context: ForwardContext

    @property
    def layer_cache(self) -> LayerKVCache:
        """What the layer keeps."""
        layer = self.kv_cache.layers[self.layer_index]
        assert layer is not None, "the layer keeps keys"
        return layer


class PagedAttention(PagedLayer):
    """Softmax attention of one layer."""

    @property
    def splits_fused_qkv(self) -> bool:
        """Whether it cuts the fused product itself: not where fresh keys are read without pages."""
        return not self._reads_fresh

    @property
    def _reads_fresh(self) -> bool:
        """Whether all keys are new, and so many that kernels without pages are faster."""
        return (
            self.forward_context.documents is not None
            and self.forward_context.batch.max_query_len >= LONG_PREFILL
        )

    def rope_and_write_kv(
        self,
        qkv_1NC: Tensor,
        sizes: QKVSizes,
        turns: RotaryCosSin,
        norms: QKNorms | None,
        *,
        interleaved: bool,
    ) -> Tensor:
        """Cut a product; norm and turn its heads; keep keys and values, return queries."""
        angles = (turns.cos, turns.sin)
        q_NHE = rope_and_write_kv(
            qkv_1NC[0], sizes, angles, self._pages, norms, interleaved=interleaved
        )
        return q_NHE[None]

    def __call__(self, q_1NHE: Tensor, k_1NKE: Tensor, v_1NKE: Tensor, **options: Any) -> Tensor:
        """Store keys and values, and return what each token reads."""
        write_kv_cache(k_1NKE[0], v_1NKE[0], self._pages)
        if self._reads_fresh:
            options["documents"] = self.forward_context.documents
            return attention(q_1NHE, k_1NKE, v_1NKE, **options)
        for unread in ("documents", "prefer", "dynamic_shapes"):
            options.pop(unread, None)
        return self.attend(q_1NHE, **options)

    def attend(self, q_1NHE: Tensor, /, **options: Any) -> Tensor:
        """Return what each token reads of the keys and values of its row."""
        step, layer = self.forward_context.batch, self.layer_cache
        assert layer.value_cache is not None, "softmax attention keeps keys and values"
        # Every layer that is served is causal.
        options.pop("causal")
        plan = self._plan(layer.key_cache, q_1NHE.shape[2], options["window"], options["chunk"])
        mixed = paged_attention(
            q_1NHE[0],
            layer.key_cache,
            layer.value_cache,
            step.block_tables_RB,
            step.seq_lens_R,
            step.query_start_loc_R1,
            self.forward_context.num_decode_rows if step.split is None else step.split,
            queries=self.forward_context.decode_query_len,
            k_scale=layer.key_scale,
            v_scale=layer.value_scale,
            plan=plan,
            **options,
        )
        return mixed[None]

    def _plan(
        self, keys: Tensor, heads: int, window: int | None, chunk: int | None
    ) -> DecodePlan | None:
        now, step = self.forward_context, self.forward_context.batch
        if not keys.is_cuda or not now.num_decode_rows:
            return None
        lengths_R = step.seq_lens_R[: now.num_decode_rows]
        live_1 = None if step.split is None else step.split.counts_2[:1]
        return now.get_decode_plan(
            (tuple(keys.shape[1:]), heads, window, chunk),
            lambda: plan_decode(
                lengths_R, keys, heads, window=window, chunk=chunk, queries=now.decode_query_len,
                live_1=live_1,
            ),
        )  # fmt: skip

    @property
    def _pages(self) -> KVCachePages:
        layer = self.layer_cache
        assert layer.value_cache is not None, "softmax attention keeps keys and values"
        slots_N = self.forward_context.batch.slot_mapping_N
        return KVCachePages(
            layer.key_cache, layer.value_cache, slots_N, layer.key_scale, layer.value_scale
        )
