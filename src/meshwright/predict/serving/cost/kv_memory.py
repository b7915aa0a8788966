"""Memory of a serving GPU: weights, buffers, and the tokens whose keys and values fit.

kv = share · (memory − taken − weights − buffers)      engines that take a share of what is free
kv = share · memory − taken − weights − buffers        engines that take a share of the device

What others that share a GPU have taken of it counts as if it were the engine's own.
"""

import msgspec

from meshwright.predict.serving.cost.attention_cost import KVBytes, count_kv_bytes
from meshwright.predict.serving.cost.quantization import get_quantized_weight
from meshwright.predict.serving.cost.replica import Replica
from meshwright.spec.model import Weight


class ServingMemory(msgspec.Struct, frozen=True, kw_only=True):
    """What lies on the fullest GPU of a replica."""

    device_bytes: float
    weight_bytes: float
    buffer_bytes: float
    """Activations of the largest step, logits, libraries, captured graphs."""
    other_process_bytes: float = 0.0
    """What others have."""
    kv_bytes: float
    """Room for keys and values; below zero where the weights alone do not fit."""
    kv: KVBytes

    @property
    def fits(self) -> bool:
        """Whether anything can be served."""
        return self.kv_bytes > 0

    def requests(self, tokens: float) -> int:
        """Return how many requests of so many tokens fit at a time, on one attention group."""
        each = self.kv.request_kv_bytes(tokens)
        return max(0, int(self.kv_bytes / each)) if each > 0 else 1 << 30

    def blocks(self, block_tokens: int) -> int:
        """Return how many blocks of the KV cache fit."""
        return max(0, int(self.kv_bytes / (self.kv.request_kv_bytes(1) * block_tokens)))


def predict_serving_memory(
    replica: Replica, batch_tokens: int | None = None, batch_requests: int | None = None
) -> ServingMemory:
    """Return what lies on the fullest GPU, and what is left for keys and values.

    `batch_tokens` and `batch_requests` bound a step; without the latter nothing is kept for words.
    """
    model, layout, engine = replica.model, replica.layout, replica.engine
    gpu = replica.cluster.gpu
    weights = _weights(replica)
    step = batch_tokens or engine.max_num_batched_tokens
    # The widest moment of a layer: its input, the residual, and the feed-forward part's inner
    # values; logits of a full step of requests in fp32.
    inner = max(
        (_inner(block.list_weights(model.hidden), layout.tp) for block in model.blocks), default=0
    )
    activations = step / layout.dp * (4 * model.hidden + 2 * inner) * 2.0
    logits = 4.0 * min(step, engine.max_num_seqs) / layout.dp * model.vocab / layout.tp
    chosen = 4.0 * engine.logit_copies * (batch_requests or 0) / layout.dp * model.vocab
    buffers = engine.reserve_bytes + activations + logits + chosen
    if engine.memory_budget == "of_free":
        room = engine.gpu_memory_utilization * (
            gpu.memory_bytes - replica.other_process_bytes - weights - buffers
        )
    else:
        room = (
            engine.gpu_memory_utilization * gpu.memory_bytes
            - replica.other_process_bytes
            - weights
            - buffers
        )
    return ServingMemory(
        device_bytes=gpu.memory_bytes,
        weight_bytes=weights,
        buffer_bytes=buffers,
        other_process_bytes=replica.other_process_bytes,
        kv_bytes=room,
        kv=count_kv_bytes(model, layout, replica.quantization),
    )


def _inner(weights: tuple[Weight, ...], tp: int) -> int:
    return max((w.fan_out // tp for w in weights if w.split == "column"), default=0)


def _weights(replica: Replica) -> float:
    """Return the bytes of the weights on the fullest GPU: even shares of layers and tables."""
    model, layout = replica.model, replica.layout
    total = 0.0
    for block, layers in model.count_layers_by_block():
        for weight in block.list_weights(model.hidden):
            size = get_quantized_weight(
                model, weight, replica.quantization, replica.cluster.gpu
            ).weight_bytes
            held = float(weight.count_rank_parameters(layout.tp))
            if weight.part == "expert":
                held = (
                    weight.copies / layout.ep * weight.entries_per_copy / layout.effective_expert_tp
                )
            total += layers * size * held
        total += (
            layers
            * replica.quantization.activation_bytes
            * block.count_vector_parameters(model.hidden, model.norm)
        )
    rows = (1 if model.tied else 2) * model.vocab
    tables = replica.quantization.activation_bytes * rows * model.hidden / layout.tp
    return total / layout.pp + tables / min(layout.pp, 2)
