"""`Decoder`: a language model made of modules, from tokens to logits or to their loss.

Training asks for `loss`, which never holds all logits; `forward` gives them. A vision tower is no
part of it: of a multimodal model the text part is built.

Shapes: B sequences, T positions, D hidden, V vocabulary, N = B·T tokens.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.run.kernels.attention.packed_sequences import PackedSequences
from meshwright.run.kernels.embedding import embedding
from meshwright.run.kernels.gemm.gemm import TORCH_GEMM, GemmBackend
from meshwright.run.kernels.loss.cross_entropy_kernel import CrossEntropyOptions
from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.kernels.loss.linear_cross_entropy import CrossEntropySums, linear_cross_entropy
from meshwright.run.nn.attention.mla import MLASelfAttention
from meshwright.run.nn.attention.self_attention import SelfAttention
from meshwright.run.nn.decoder_layer import DecoderLayer, ResidualStream
from meshwright.run.nn.moe.moe_layer import MoELayer
from meshwright.run.nn.multi_token_prediction import MultiTokenPredictionLayer, shift_tokens
from meshwright.run.nn.norm import NormLayer
from meshwright.run.nn.positions import PositionInfo, PositionTables
from meshwright.spec.model import Model


@dataclass(frozen=True, slots=True)
class BatchLoss:
    """What a batch costs, as sums over its tokens: divide by the count for means."""

    loss_sum: Tensor
    """fp32 scalar: cross-entropy of the next tokens."""
    count: Tensor
    """int64 scalar: tokens that count."""
    auxiliary_loss: Tensor
    """fp32 scalar: what training adds, in the same units: further tokens' and balancing losses."""

    @property
    def total(self) -> Tensor:
        """What training differentiates, still to be divided by a count."""
        return self.loss_sum + self.auxiliary_loss


_Read = TypeVar("_Read", bound=Tensor | CrossEntropySums | tuple[Tensor | None, ...])

FutureTokens = Sequence[tuple[Tensor, Tensor]]
"""The tokens and the labels that lie 1, 2, … places on."""


class TokenEmbedding(nn.Module):
    """Rows of vectors, looked up by number; `parallel_lookup` is for those of several ranks."""

    def __init__(
        self, rows: int, width: int, *, is_vocab_parallel: bool = False, **where: Any
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width, **where))
        self.is_vocab_parallel = is_vocab_parallel
        """Tensor-parallel ranks hold some of the rows each."""
        self.parallel_lookup: Callable[[Tensor, Tensor], Tensor] | None = None

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the row of each number."""
        if self.parallel_lookup is not None:
            return self.parallel_lookup(numbers, self.weight)
        return embedding(numbers, self.weight)


class VocabParallelHead(Protocol):
    """The head of ranks that hold some rows of its weight each."""

    def loss(
        self,
        x_BTD: Tensor,
        labels_BT: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        rule: CrossEntropyOptions,
    ) -> CrossEntropySums:
        """Return the summed cross-entropy over all words."""

    def logits(self, x_BTD: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the products with all words, neither scaled nor capped."""


class LMHead(nn.Module):
    """The product that makes logits; without a weight of its own where it is tied."""

    def __init__(self, hidden: int, vocab: int, *, tied: bool, bias: bool, **where: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter | None
        self.bias: nn.Parameter | None
        self.gemm: GemmBackend = TORCH_GEMM
        self.vocab_parallel: VocabParallelHead | None = None
        """Where ranks hold some words each, how they make one loss of it."""
        weight = None if tied else nn.Parameter(torch.empty(vocab, hidden, **where))
        self.register_parameter("weight", weight)
        self.register_parameter("bias", nn.Parameter(torch.empty(vocab, **where)) if bias else None)


class Decoder(nn.Module):
    """A model's modules, in the order a token meets them. `build` makes them."""

    def __init__(
        self,
        model: Model,
        *,
        multi_token: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model, self.position_tables = model, PositionTables(model.max_positions)
        self.z_loss_coeff, self.mtp_loss_scaling_factor, self.moe_aux_loss_coeff = 0.0, 0.1, 0.0
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = TokenEmbedding(model.vocab, model.hidden, is_vocab_parallel=True, **where)
        if model.positions == "learned":
            rows = model.max_positions + model.position_offset
            self.positions = TokenEmbedding(rows, model.hidden, **where)
        if model.embedding_norm:
            self.norm_embedding = NormLayer(model.hidden, model.norm, **where)
        alibi = model.positions == "alibi"
        self.layers = nn.ModuleList(
            DecoderLayer(block, model.hidden, model.norm, alibi=alibi, **where)
            for block in model.layer_blocks()
        )
        if model.final_norm:
            self.final_norm = NormLayer(model.hidden, model.norm, **where)
        self.head = LMHead(
            model.hidden, model.vocab, tied=model.tied, bias=model.head_bias, **where
        )
        depth = model.multi_token.depth if multi_token and model.multi_token is not None else 0
        self.multi_token = nn.ModuleList(
            MultiTokenPredictionLayer(model, **where) for _ in range(depth)
        )

    def set_dynamic_shapes(self) -> None:
        """Let no kernel plan for a shape: most passes bring a new one, as rollouts do."""
        for module in self.modules():
            if isinstance(module, SelfAttention | MLASelfAttention):
                module.dynamic_shapes = True

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        positions: Tensor | None = None,
        documents: PackedSequences | None = None,
    ) -> Tensor:
        """Return the logits of every token's successor, (B, T, V)."""
        return self.logits(
            self.compute_hidden_states(tokens_BT, positions=positions, documents=documents)
        )

    def compute_hidden_states(
        self,
        tokens_BT: Tensor,
        *,
        positions: Tensor | None = None,
        documents: PackedSequences | None = None,
    ) -> Tensor:
        """Return what the output head reads, (B, T, D): the stream after the final norm."""
        places = PositionInfo(
            self.position_tables, tokens_BT, positions=positions, documents=documents
        )
        return self.forward_hidden(tokens_BT, places)

    def forward_hidden(self, tokens_BT: Tensor, places: PositionInfo) -> Tensor:
        """Do the same for tokens whose places are known."""
        return self.apply_final_norm(*self.forward_layers(tokens_BT, places))

    def forward_layers(
        self, tokens_BT: Tensor, places: PositionInfo, wanted_W: Tensor | None = None
    ) -> ResidualStream:
        """Return the stream behind the last layer; of a single sequence, some tokens may do."""
        stream: ResidualStream = (self.embed(tokens_BT, places), None)
        last = self.layers[-1] if wanted_W is not None else None
        for layer in self.layers:
            if layer is last and wanted_W is not None:
                assert isinstance(layer, DecoderLayer), "a decoder that is served has blocks"
                stream = layer.forward_selected_tokens(*stream, places, wanted_W)
            else:
                stream = layer(*stream, places)
        return stream

    def embed(self, tokens_BT: Tensor, places: PositionInfo) -> Tensor:
        """Return the vectors that enter the first layer."""
        x_BTD: Tensor = self.embedding(tokens_BT)
        if self.model.embedding_scale is not None:
            x_BTD = x_BTD * self.model.embedding_scale
        if self.model.positions == "learned":
            rows = places.get_positions_BT() + self.model.position_offset
            x_BTD = x_BTD + self.positions(rows)
        return self.norm_embedding(x_BTD) if self.model.embedding_norm else x_BTD

    def apply_final_norm(self, branch: Tensor, residual: Tensor | None) -> Tensor:
        """Return what the output head reads of the stream behind the last layer."""
        if self.model.final_norm:
            normed, _ = self.final_norm.add_and_norm(branch, residual)
            return normed
        return branch if residual is None else branch + residual

    def logits(self, x_BTD: Tensor) -> Tensor:
        """Return the logits of hidden vectors."""
        if self.head.vocab_parallel is not None:
            logits = self.head.vocab_parallel.logits(x_BTD, self.head_weight, self.head.bias)
        else:
            logits = functional.linear(x_BTD, self.head_weight, self.head.bias)
        return self.scale_logits(logits)

    def scale_logits(self, logits: Tensor) -> Tensor:
        """Return logits as the model scales and caps them."""
        if self.model.logit_scale is not None:
            logits = logits * self.model.logit_scale
        cap = self.model.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def with_head_weight(self, read: Callable[[], _Read]) -> _Read:
        """Return what a function makes of the head's weights, which are here while it runs."""
        return read()

    @property
    def head_weight(self) -> Tensor:
        """The weight of the output head, which may be the embedding's."""
        return self.embedding.weight if self.head.weight is None else self.head.weight

    def loss(
        self,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        *,
        positions: Tensor | None = None,
        documents: PackedSequences | None = None,
    ) -> BatchLoss:
        """Return the cross-entropy of labels (except `IGNORE_INDEX`) without storing all logits."""
        places = PositionInfo(
            self.position_tables, tokens_BT, positions=positions, documents=documents
        )
        return self.compute_loss_from_stream(
            self.forward_layers(tokens_BT, places), tokens_BT, labels_BT, places
        )

    def compute_loss_from_stream(
        self,
        stream: ResidualStream,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        places: PositionInfo,
        ahead: FutureTokens | None = None,
    ) -> BatchLoss:
        """Return the loss of the stream behind the last layer.

        `ahead` has the tokens and labels that lie 1, 2, … places on, where sequences are not whole.
        """
        x_BTD = self.apply_final_norm(*stream)
        sums = self.head_loss(x_BTD, labels_BT)
        auxiliary = torch.zeros((), device=x_BTD.device)
        if len(self.multi_token):
            if ahead is None:
                ids_BT, steps = places.get_document_ids_BT(), range(1, len(self.multi_token) + 1)
                ahead = [
                    (
                        shift_tokens(tokens_BT, step, 0, ids_BT),
                        shift_tokens(labels_BT, step, IGNORE_INDEX, ids_BT),
                    )
                    for step in steps
                ]
            auxiliary = self._further_loss(x_BTD, ahead, places)
        if self.moe_aux_loss_coeff and self.training:
            auxiliary = auxiliary + self.moe_aux_loss_coeff * sums.count * self._balance_loss()
        return BatchLoss(sums.loss_sum, sums.count, auxiliary)

    def _further_loss(self, x_BTD: Tensor, ahead: FutureTokens, places: PositionInfo) -> Tensor:
        """Return the weighted mean over the multi-token heads of their summed cross-entropy."""
        total = torch.zeros((), device=x_BTD.device)
        for head, (tokens_BT, labels_BT) in zip(self.multi_token, ahead, strict=True):
            x_BTD = head(x_BTD, self.embed(tokens_BT, places), places)
            total = total + self.head_loss(x_BTD, labels_BT).loss_sum
        return total * (self.mtp_loss_scaling_factor / len(self.multi_token))

    def _balance_loss(self) -> Tensor:
        """Return the sum of what the routed layers lose by unequal use of their experts."""
        total = torch.zeros((), device=next(self.parameters()).device)
        for part in self.iter_moe_layers():
            if part.balance_loss is not None:
                total, part.balance_loss = total + part.balance_loss, None
        return total

    def iter_moe_layers(self) -> Iterator[MoELayer]:
        """Go through the routed feed-forward parts, those of multi-token heads included."""
        return (part for part in self.modules() if isinstance(part, MoELayer))

    def head_loss(self, x_BTD: Tensor, labels_BT: Tensor) -> CrossEntropySums:
        """Return the summed cross-entropy of hidden vectors against labels."""
        if self.head.vocab_parallel is not None:
            model = self.model
            rule = CrossEntropyOptions(
                IGNORE_INDEX, model.logit_softcap, model.logit_scale, self.z_loss_coeff
            )
            weights = (self.head_weight, self.head.bias)
            return self.head.vocab_parallel.loss(x_BTD, labels_BT, *weights, rule)
        return linear_cross_entropy(
            x_BTD.flatten(0, 1),
            self.head_weight,
            labels_BT.flatten(),
            bias=self.head.bias,
            ignore=IGNORE_INDEX,
            softcap=self.model.logit_softcap,
            scale=self.model.logit_scale,
            z_loss=self.z_loss_coeff,
            gemm=self.head.gemm,
        )
