"""`Forward`: one step of a served model, from tokens to the logits that are wanted.

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
from meshwright.run.nn.attention import Attention
from meshwright.run.nn.block import Block, wanted_of
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.gated_delta import GatedDelta
from meshwright.run.nn.latent import LatentAttention
from meshwright.run.nn.mamba2 import Mamba2
from meshwright.run.nn.positions import Places
from meshwright.run.serve.model.cache import PagedCache
from meshwright.run.serve.model.latent_pages import PagedLatent
from meshwright.run.serve.model.paged import Now, PagedAttention
from meshwright.run.serve.model.recurrent import DeltaStates, LayerStates, MambaStates
from meshwright.run.serve.model.steady import make_steady, steady_linear
from meshwright.run.serve.model.step import Step


class Forward:
    """A decoder and its cache, ready to compute steps."""

    def __init__(
        self,
        decoder: Decoder,
        cache: PagedCache,
        *,
        max_length: int | None = None,
        state_rows: int = 256,
        invariant: bool = False,
    ) -> None:
        """Take hold of a decoder.

        `max_length` is the most tokens of a sequence; None is the model's context. `state_rows` is
        the most sequences at a time, for models with recurrent layers. With `invariant` a row gets
        the same bits whatever else is in the batch (see `steady`).
        """
        self.decoder = decoder.eval().requires_grad_(False)
        if invariant:
            make_steady(decoder)
        self.cache = cache
        self.now = Now(invariant, on_gpu=cache.device.type == "cuda")
        self.max_length = max_length or decoder.model.max_positions
        _check_length(decoder, self.max_length)
        self.states: list[LayerStates] = []
        for number, layer in enumerate(decoder.layers):
            assert isinstance(layer, Block)
            self._take(layer, number, state_rows)

    @property
    def has_weights(self) -> bool:
        """Whether the weights are here, and not given back."""
        return self.decoder.embedding.weight.numel() > 0

    @property
    def recurrent(self) -> bool:
        """Whether sequences have states, so that no prefix is shared and no step undone."""
        return bool(self.states)

    def _take(self, layer: Block, number: int, state_rows: int) -> None:
        match layer.mixer:
            case Attention() as mixer:
                _check_causal(mixer.spec.causal, number)
                paged = PagedAttention(self.cache, number, self.now)
                mixer.across = mixer.keeps = paged
            case LatentAttention() as mixer:
                _check_causal(mixer.spec.causal, number)
                mixer.absorbed = PagedLatent(self.cache, number, self.now, mixer)
            case Mamba2() as mixer:
                mixer.carried = MambaStates(self.now, state_rows, mixer)
                self.states.append(mixer.carried)
            case GatedDelta() as mixer:
                mixer.carried = DeltaStates(self.now, state_rows, mixer)
                self.states.append(mixer.carried)

    @torch.no_grad()
    def hidden(self, step: Step) -> Tensor:
        """Return what the output head reads of the wanted tokens, (W, D)."""
        tokens_1N = step.tokens_N[None]
        places = Places(
            self.decoder.tables, tokens_1N, positions=step.positions_N[None], reach=self.max_length
        )
        self.now.begin(step)
        # Adapters go by the tokens of the whole step.
        few = step.wanted_W if self.now.adapters is None else None
        stream = self.decoder.through(tokens_1N, places, few)
        if step.wanted_W is not None and few is None:
            stream = wanted_of(stream, step.wanted_W)
        return self.decoder.finish(*stream)[0]

    @torch.no_grad()
    def run(self, step: Step) -> Tensor:
        """Return the logits of the wanted tokens, (W, V)."""
        return self.logits(self.hidden(step), step.logits_WV)

    @torch.no_grad()
    def logits(self, hidden_WD: Tensor, room: Tensor | None = None) -> Tensor:
        """Return the logits of hidden states, (W, V), in `room` where there is some."""
        decoder = self.decoder
        if room is not None and self._plain_head:
            return torch.mm(hidden_WD, decoder.head_weight.t(), out=room)
        if self.now.invariant:
            raw = steady_linear(hidden_WD, decoder.head_weight, decoder.head.bias)
            logits = decoder.shaped(raw)
        else:
            logits = decoder.logits(hidden_WD)
        return logits if room is None else room.copy_(logits)

    @property
    def _plain_head(self) -> bool:
        """Whether logits are one product and nothing else."""
        head, model = self.decoder.head, self.decoder.model
        shaped = model.logit_scale is not None or model.logit_softcap is not None
        return not shaped and head.bias is None and head.shared is None and not self.now.invariant


def _check_length(decoder: Decoder, length: int) -> None:
    most = decoder.model.max_positions
    if decoder.model.positions == "learned" and length > most:
        what = f"{length} positions, but the model learned {most}"
        raise InputError([Problem("max_length", what, f"use at most {most}")])


def _check_causal(causal: bool, number: int) -> None:
    if not causal:
        what = "tokens see those that come later, which are not there yet when an answer is written"
        raise InputError([Problem(f"layers[{number}]", what, "serve a causal language model")])
