"""`SelfAttention`: softmax attention with grouped keys and values, between two products.

The path of a Llama block is exactly: one product for queries, keys and values, one kernel that
turns queries and keys in place, attention on strided views of the same memory, one product out.
Every other feature (norms of queries and keys, clipping, gates, sinks, slopes, …) adds its own
step where a model has it.

`qkv.weight` stacks the rows of q, k, v and, where the output is gated, of the gate, heads in order.
A slice of the heads works alone, once it is told how many it has.

Shapes: B sequences, T positions, D hidden, C columns of the fused product, H query heads, K key
and value heads, E head width.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from meshwright.run.kernels.attention.sdpa import AttentionBackend, attention
from meshwright.run.kernels.norm.rms_norm import rms_norm
from meshwright.run.kernels.rotary.qk_norm_rope import QKNorms, split_qkv_norm_rope
from meshwright.run.kernels.rotary.rotary import QKVSizes, apply_rotary, split_qkv_apply_rotary
from meshwright.run.nn.linear.linear import Linear
from meshwright.run.nn.norm import NormLayer
from meshwright.run.nn.positions import PositionInfo, RotaryCosSin, compute_query_scale
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
from meshwright.run.nn.sharding.sharded_norm import AllReduceSum, NormShard, apply_sharded_norm
from meshwright.spec.model import block, token_mixers


class AttentionCache(Protocol):
    """Keeps the keys and values of earlier passes, and attends to them."""

    @property
    def splits_fused_qkv(self) -> bool:
        """Whether it cuts the fused product of this pass itself."""

    def rope_and_write_kv(
        self,
        qkv_BTC: Tensor,
        sizes: QKVSizes,
        turns: RotaryCosSin,
        norms: QKNorms | None,
        /,
        *,
        interleaved: bool,
    ) -> Tensor:
        """Cut a product; norm and turn its heads; keep keys and values, return queries."""

    def attend(self, q_BTHE: Tensor, /, **options: Any) -> Tensor:
        """Attend to all that is kept."""


class SelfAttention(nn.Module):
    """Attention as a model's `AttentionSpec` describes it."""

    def __init__(
        self,
        spec: token_mixers.AttentionSpec,
        hidden: int,
        norm: block.NormSpec,
        *,
        alibi: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.eps, self.alibi = spec, norm.eps, alibi
        self.recompute: frozenset[RecomputeOpOrFull] = NO_RECOMPUTE
        self.input_is_normed = True
        """Whether the input is a norm's output, which recompute can drop."""
        self.preferred_backend: AttentionBackend | None = None
        """The kernel to use in place of the fastest."""
        self.dynamic_shapes = False
        """Whether most passes bring new shapes, for which no kernel shall plan."""
        self.parallel_hooks: ParallelHooks | None = None
        """Where ranks share the heads, the way to them and back."""
        self.core_attention: Callable[..., Tensor] | None = None
        """Where ranks share the tokens of a sequence, what attends in place of `attention`."""
        self.attention_cache: AttentionCache | None = None
        """Where sequences come in pieces, what keeps their keys and values."""
        self.heads, self.kv_heads = spec.heads, spec.kv_heads
        """Query heads held here, and key and value heads."""
        self.first_head = 0
        """Where the query heads held here start in the whole model's."""
        self.kv_replicas = 1
        """Ranks that hold the same key and value heads."""
        self.all_reduce_sum: AllReduceSum | None = None
        """Where ranks share the heads, adds up what each found in its own."""
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        columns = queries * (2 if spec.gate else 1) + 2 * keys
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv = Linear(hidden, columns, bias=spec.qkv_bias, **where)
        self.o = Linear(queries, hidden, bias=spec.out_bias, **where)
        if spec.qk_norm in {"head", "full"}:
            whole = spec.qk_norm == "full"
            self.q_norm = NormLayer(queries if whole else spec.head_dim, norm, **where)
            self.k_norm = NormLayer(keys if whole else spec.head_dim, norm, **where)
        self.sinks: nn.Parameter | None
        sinks = nn.Parameter(torch.empty(spec.heads, **where)) if spec.sinks else None
        self.register_parameter("sinks", sinks)

    def get_initial_values(self) -> dict[str, float]:
        """Return the value each vector starts from: sinks weigh as much as a score of nought."""
        return {"sinks": 0.0}

    def forward(self, x_BTD: Tensor, places: PositionInfo) -> Tensor:
        """Mix the tokens of each sequence."""
        dropped_input = self.input_is_normed and "layernorm" in self.recompute
        with apply_input_hook(self.parallel_hooks, x_BTD) as inside:
            qkv_BTC = self.qkv(inside, input_is_free=dropped_input)
        if self.spec.clip is not None and self.spec.qk_norm != "full":
            qkv_BTC = qkv_BTC.clamp(-self.spec.clip, self.spec.clip)
        if (
            self.attention_cache is not None
            and self.attention_cache.splits_fused_qkv
            and self._can_keep
        ):
            return self._out(self._kept(qkv_BTC, places, self.attention_cache), input_is_free=False)
        q, k, v, gate = self._heads(qkv_BTC, places)
        if "core_attn" not in self.recompute:
            # Backward of the attention itself keeps its output, unless that is gated.
            return self._out(self._core(q, k, v, gate, places), input_is_free=gate is None)
        replay = RecomputedFunction(self._core)
        mixed = replay(q, k, v, gate, places)
        with drop_saved_tensors((mixed, replay.recompute_output)):
            return self._out(mixed, input_is_free=True)

    def _out(self, mixed_BTHE: Tensor, *, input_is_free: bool) -> Tensor:
        return apply_output_hook(
            self.parallel_hooks, self.o(mixed_BTHE.flatten(2), input_is_free=input_is_free)
        )

    def _kept(self, qkv_BTC: Tensor, places: PositionInfo, keeps: AttentionCache) -> Tensor:
        """Let whoever keeps keys and values cut the product, and attend."""
        spec = self.spec
        assert spec.rotary is not None, "a fused QKV GEMM without rotary angles is split here"
        sizes = QKVSizes(self.heads, self.kv_heads, spec.head_dim)
        turns = places.get_rotary(spec.rotary, spec.head_dim)
        norms = self._head_norms() if spec.qk_norm == "head" else None
        q = keeps.rope_and_write_kv(
            qkv_BTC, sizes, turns, norms, interleaved=spec.rotary.interleaved
        )
        return keeps.attend(self._grown(q, places), **self._options(places))

    def _core(
        self, q: Tensor, k: Tensor, v: Tensor, gate_BTHE: Tensor | None, places: PositionInfo
    ) -> Tensor:
        attend = attention if self.core_attention is None else self.core_attention
        options = self._options(places)
        options |= {
            "documents": places.documents,
            "prefer": self.preferred_backend,
            "dynamic_shapes": self.dynamic_shapes,
        }
        mixed = attend(q, k, v, **options)
        return mixed if gate_BTHE is None else mixed * torch.sigmoid(gate_BTHE)

    def _options(self, places: PositionInfo) -> dict[str, Any]:
        """Return how the layer attends."""
        spec, slopes = self.spec, None
        if self.alibi:
            slopes = places.get_alibi_slopes(spec.heads)[
                self.first_head : self.first_head + self.heads
            ]
        return {
            "causal": spec.causal,
            "window": spec.window,
            "chunk": spec.chunk,
            "scale": spec.scale,
            "softcap": spec.softcap,
            "sinks": self.sinks,
            "alibi": slopes,
        }

    def _heads(
        self, qkv_BTC: Tensor, places: PositionInfo
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Cut the fused product into heads, norm and turn them."""
        spec = self.spec
        sizes = (self.heads, self.kv_heads, spec.head_dim)
        gate = None
        if self._is_fused and spec.rotary is not None:
            turns = places.get_rotary(spec.rotary, spec.head_dim)
            angles = (turns.cos, turns.sin)
            turned = spec.rotary.interleaved
            if spec.qk_norm == "head":
                norms = self._head_norms()
                q, k, v = split_qkv_norm_rope(qkv_BTC, *sizes, *angles, norms, interleaved=turned)
            else:
                q, k, v = split_qkv_apply_rotary(qkv_BTC, *sizes, *angles, interleaved=turned)
        else:
            q, k, v, gate = self._heads_apart(qkv_BTC, sizes, places)
        if spec.qk_norm == "l2":
            # After the turn, as Llama 4 does; a turn changes no length.
            q, k = rms_norm(q, None, self.eps), rms_norm(k, None, self.eps)
        return self._grown(q, places), k, v, gate

    def _grown(self, q_BTHE: Tensor, places: PositionInfo) -> Tensor:
        """Let queries grow with their position, where the model does."""
        if self.spec.temperature is None:
            return q_BTHE
        growth = compute_query_scale(self.spec.temperature, places.get_positions_BT())
        return q_BTHE * growth[..., None, None].to(q_BTHE.dtype)

    @property
    def _can_keep(self) -> bool:
        """One kernel cuts the product and stores keys; an L2 norm would come after the turn."""
        return self._is_fused and self.spec.qk_norm != "l2"

    @property
    def _is_fused(self) -> bool:
        """One kernel makes queries, keys and values of the product."""
        spec = self.spec
        if spec.rotary is None or spec.gate or spec.qk_norm == "full":
            return False
        return spec.qk_norm != "head" or (self.q_norm.kind == "rms" and self.q_norm.bias is None)

    def _head_norms(self) -> QKNorms:
        q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
        assert q_weight is not None
        assert k_weight is not None
        return QKNorms(q_weight, k_weight, self.q_norm.eps, self.q_norm.unit_offset)

    def _heads_apart(
        self, qkv_BTC: Tensor, sizes: tuple[int, int, int], places: PositionInfo
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Cut, norm and turn one after the other."""
        (heads, kv_heads, width), rotary = sizes, self.spec.rotary
        parts = [heads, kv_heads, kv_heads] + ([heads] if self.spec.gate else [])
        q, k, v, *gates = torch.split(qkv_BTC.view(*places.shape, -1, width), parts, 2)
        if self.spec.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        elif self.spec.qk_norm == "full":
            q, k = self._norms_of_all_heads(q, k)
            if (clip := self.spec.clip) is not None:
                # Behind the norms, as OLMoE's code has it.
                q, k, v = q.clamp(-clip, clip), k.clamp(-clip, clip), v.clamp(-clip, clip)
        if rotary is not None:
            turns = places.get_rotary(rotary, width)
            q = apply_rotary(q, turns.cos, turns.sin, interleaved=rotary.interleaved)
            k = apply_rotary(k, turns.cos, turns.sin, interleaved=rotary.interleaved)
        return q, k, v, gates[0] if gates else None

    def _norms_of_all_heads(self, q_BTHE: Tensor, k_BTKE: Tensor) -> tuple[Tensor, Tensor]:
        """Normalise the queries of all heads together, and the keys."""
        q, k = q_BTHE.flatten(2), k_BTKE.flatten(2)
        if self.all_reduce_sum is None:
            q, k = self.q_norm(q), self.k_norm(k)
        else:
            width, spec = self.spec.head_dim, self.spec
            queries = NormShard(q, self.q_norm, spec.heads * width)
            keys = NormShard(k, self.k_norm, spec.kv_heads * width, self.kv_replicas)
            q, k = apply_sharded_norm((queries, keys), self.all_reduce_sum)
        return q.view(q_BTHE.shape), k.view(k_BTKE.shape)
