"""`ServedModel`: one step of a served model, from tokens to the logits that are wanted.

Nothing is kept for a backward pass. Rows whose logits nobody wants are dropped within the last
layer, before its feed-forward part. A step with one token per row asks the host nothing, and its
kernels and addresses depend on the number of rows alone, so that it can be captured in a graph.

Rotary rules that look at the length of a sequence (`dynamic`, `longrope`) look at the longest one
that may be served, once and for all: keys that are kept cannot be turned again.

Shapes: N tokens, W wanted ones, D hidden, V vocabulary.
"""

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.nn.attention.mla import MLASelfAttention
from meshwright.run.nn.attention.self_attention import SelfAttention
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_layer import DecoderLayer, select_tokens
from meshwright.run.nn.positions import PositionInfo
from meshwright.run.nn.ssm.gated_delta_net import GatedDeltaNet
from meshwright.run.nn.ssm.mamba2 import Mamba2Mixer
from meshwright.run.serve.model.batch_invariant import (
    batch_invariant_linear,
    enable_batch_invariance,
)
from meshwright.run.serve.model.forward_batch import ForwardBatch
from meshwright.run.serve.model.kv_cache import PagedKVCache
from meshwright.run.serve.model.mla_attention import PagedLatentAttention
from meshwright.run.serve.model.paged_attention import ForwardContext, PagedAttention
from meshwright.run.serve.model.recurrent_state import (
    GatedDeltaLayerState,
    MambaLayerState,
    RecurrentLayerState,
)


class ServedModel:
    """A decoder and its cache, ready to compute steps."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: PagedKVCache,
        *,
        max_model_len: int | None = None,
        state_rows: int = 256,
        batch_invariant: bool = False,
    ) -> None:
        """Take hold of a decoder.

        `max_model_len` is the most tokens of a sequence; None is the model's context. `state_rows`
        is the most sequences at a time, for models with recurrent layers. With `batch_invariant` a
        row gets the same bits whatever else is in the batch.
        """
        self.decoder = decoder.eval().requires_grad_(False)
        if batch_invariant:
            enable_batch_invariance(decoder)
        self.kv_cache = kv_cache
        self.forward_context = ForwardContext(
            batch_invariant, on_gpu=kv_cache.device.type == "cuda"
        )
        self.max_model_len = max_model_len or decoder.model.max_positions
        _check_length(decoder, self.max_model_len)
        self.recurrent_states: list[RecurrentLayerState] = []
        for number, layer in enumerate(decoder.layers):
            assert isinstance(layer, DecoderLayer)
            self._take(layer, number, state_rows)

    @property
    def has_weights(self) -> bool:
        """Whether the weights are here, and not given back."""
        return self.decoder.embedding.weight.numel() > 0

    @property
    def has_recurrent_state(self) -> bool:
        """Whether sequences have states, so that no prefix is shared and no step undone."""
        return bool(self.recurrent_states)

    def _take(self, layer: DecoderLayer, number: int, state_rows: int) -> None:
        match layer.mixer:
            case SelfAttention() as mixer:
                _check_causal(mixer.spec.causal, number)
                paged = PagedAttention(self.kv_cache, number, self.forward_context)
                mixer.core_attention = mixer.attention_cache = paged
            case MLASelfAttention() as mixer:
                _check_causal(mixer.spec.causal, number)
                mixer.absorbed_attention = PagedLatentAttention(
                    self.kv_cache, number, self.forward_context, mixer
                )
            case Mamba2Mixer() as mixer:
                mixer.recurrent_cache = MambaLayerState(self.forward_context, state_rows, mixer)
                self.recurrent_states.append(mixer.recurrent_cache)
            case GatedDeltaNet() as mixer:
                mixer.recurrent_cache = GatedDeltaLayerState(
                    self.forward_context, state_rows, mixer
                )
                self.recurrent_states.append(mixer.recurrent_cache)

    @torch.no_grad()
    def compute_hidden_states(self, step: ForwardBatch) -> Tensor:
        """Return what the output head reads of the wanted tokens, (W, D)."""
        tokens_1N = step.tokens_N[None]
        places = PositionInfo(
            self.decoder.position_tables,
            tokens_1N,
            positions=step.positions_N[None],
            max_position_count=self.max_model_len,
        )
        self.forward_context.set_batch(step)
        # Adapters go by the tokens of the whole step.
        few = step.logits_positions_W if self.forward_context.lora_mask is None else None
        stream = self.decoder.forward_layers(tokens_1N, places, few)
        if step.logits_positions_W is not None and few is None:
            stream = select_tokens(stream, step.logits_positions_W)
        return self.decoder.apply_final_norm(*stream)[0]

    @torch.no_grad()
    def forward(self, step: ForwardBatch) -> Tensor:
        """Return the logits of the wanted tokens, (W, V)."""
        return self.compute_logits(self.compute_hidden_states(step), step.logits_WV)

    @torch.no_grad()
    def compute_logits(self, hidden_WD: Tensor, room: Tensor | None = None) -> Tensor:
        """Return the logits of hidden states, (W, V), in `room` where there is some."""
        decoder = self.decoder
        if room is not None and self._plain_head:
            return torch.mm(hidden_WD, decoder.head_weight.t(), out=room)
        if self.forward_context.batch_invariant:
            raw = batch_invariant_linear(hidden_WD, decoder.head_weight, decoder.head.bias)
            logits = decoder.scale_logits(raw)
        else:
            logits = decoder.logits(hidden_WD)
        return logits if room is None else room.copy_(logits)

    @property
    def _plain_head(self) -> bool:
        """Whether logits are one product and nothing else."""
        head, model = self.decoder.head, self.decoder.model
        shaped = model.logit_scale is not None or model.logit_softcap is not None
        return (
            not shaped
            and head.bias is None
            and head.vocab_parallel is None
            and not self.forward_context.batch_invariant
        )


def _check_length(decoder: Decoder, length: int) -> None:
    most = decoder.model.max_positions
    if decoder.model.positions == "learned" and length > most:
        what = f"{length} positions, but the model learned {most}"
        raise InputError([Problem("max_model_len", what, f"use at most {most}")])


def _check_causal(causal: bool, number: int) -> None:
    if not causal:
        what = "tokens see those that come later, which are not there yet when an answer is written"
        raise InputError([Problem(f"layers[{number}]", what, "serve a causal language model")])
