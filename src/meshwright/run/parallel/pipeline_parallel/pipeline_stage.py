"""`StageExecutor`: forward and backward passes of a step through the chunks of a pipeline rank.

A chunk reads a leaf of its own graph, so a microbatch has one graph per chunk; backward begins at
the chunk's end with the gradient that came from the next one, and leaves the leaf's for the one
before. Of a chunk's output nothing is kept but where backward begins.

The balancing loss of routed experts is differentiated in the chunk that has them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.kernels.weight_grad_store import WeightGradStore, delay_wgrad_compute
from meshwright.run.nn.decoder import BatchLoss, Decoder
from meshwright.run.nn.decoder_layer import DecoderLayer, ResidualStream
from meshwright.run.nn.moe.moe_layer import MoELayer
from meshwright.run.nn.positions import PositionInfo
from meshwright.run.nn.recompute import apply_recompute
from meshwright.run.parallel.microbatch import HeadLoss, Microbatch
from meshwright.spec.layout import Layout
from meshwright.spec.layout.pipeline_chunks import ModelChunk, list_chunks_by_rank


def drop_other_stages(decoder: Decoder, chunks: Sequence[ModelChunk]) -> None:
    """Take from a decoder built without memory what other pipeline ranks hold."""
    held = {index for chunk in chunks for index in range(chunk.first, chunk.last)}
    first = any(chunk.has_embedding for chunk in chunks)
    last = any(chunk.has_head for chunk in chunks)
    kept = nn.ModuleDict(
        {str(index): layer for index, layer in enumerate(decoder.layers) if index in held}
    )
    decoder.layers = kept  # type: ignore[assignment]  # layers keep their numbers as names
    # Heads that predict further tokens read embeddings at the other end, tied ones their table.
    embeds = first or (last and len(decoder.multi_token) > 0)
    for name in ("positions", "norm_embedding"):
        if not embeds and hasattr(decoder, name):
            delattr(decoder, name)
    if not (embeds or (last and decoder.model.tied)):
        del decoder.embedding
    if not last:
        del decoder.head
        if hasattr(decoder, "final_norm"):
            del decoder.final_norm
        decoder.multi_token = nn.ModuleList()


class PipelineStage:
    """Runs the chunks of one pipeline rank."""

    def __init__(self, decoder: Decoder, layout: Layout, rank: int) -> None:
        """`rank` is the pipeline rank whose layers the decoder has."""
        self.decoder = decoder
        self.chunks = {
            chunk.position: chunk
            for chunk in list_chunks_by_rank(layout, decoder.model.layers)[rank]
        }
        # Matrices have the format of the stream; some vectors are kept wider.
        matrices = (each for each in decoder.parameters() if each.dim() > 1)
        self.dtype = next((each.dtype for each in matrices), torch.get_default_dtype())
        """Format of the stream."""
        self.head_loss: HeadLoss | None = None
        """What is minimised in place of the cross-entropy of the labels."""
        for chunk in self.chunks.values():
            apply_recompute(self.list_layers(chunk), layout)

    def forward_one_chunk(
        self, position: int, microbatch: Microbatch, x_BTD: Tensor | None
    ) -> Tensor | BatchLoss:
        """Run a chunk: return the stream for the next one, or the loss behind the last.

        The first chunk reads the tokens, every other `x_BTD`.
        """
        decoder, chunk = self.decoder, self.chunks[position]
        places = self._places(microbatch)
        if chunk.has_embedding:
            stream: ResidualStream = (decoder.embed(microbatch.tokens_BT, places), None)
        else:
            assert x_BTD is not None, "only the first chunk reads tokens"
            stream = (x_BTD, None)
        for layer in self.list_layers(chunk):
            stream = layer(*stream, places)
        if chunk.has_head and self.head_loss is not None:
            return self.head_loss(decoder.apply_final_norm(*stream), microbatch)
        if chunk.has_head:
            given = (microbatch.tokens_BT, microbatch.labels_BT)
            return decoder.compute_loss_from_stream(
                stream, *given, places, microbatch.future_tokens
            )
        branch, residual = stream
        return branch if residual is None else branch + residual

    def compute_balance_loss(self, position: int, microbatch: Microbatch) -> Tensor | None:
        """Return what the routed layers of a chunk without the head lose by unequal use.

        Asked behind the chunk's forward pass, once. Behind the last chunk it is part of the loss.
        """
        weight = self.decoder.moe_aux_loss_coeff
        if not weight or not self.decoder.training or self.head_loss is not None:
            return None
        losses = []
        for layer in self.list_layers(self.chunks[position]):
            part = layer.mlp
            if isinstance(part, MoELayer) and part.balance_loss is not None:
                losses.append(part.balance_loss)
                part.balance_loss = None
        if not losses:
            return None
        count = (microbatch.labels_BT != IGNORE_INDEX).sum()
        return weight * count * torch.stack(losses).sum()

    def list_layers(self, chunk: ModelChunk) -> list[DecoderLayer]:
        """Return the layers of a chunk."""
        return [
            self.decoder.get_submodule(f"layers.{index}")  # type: ignore[misc]  # it is a Block
            for index in range(chunk.first, chunk.last)
        ]

    def _places(self, microbatch: Microbatch) -> PositionInfo:
        return PositionInfo(
            self.decoder.position_tables,
            microbatch.tokens_BT,
            positions=microbatch.positions_BT,
            documents=microbatch.documents,
            full_sequence_length=microbatch.full_sequence_length,
        )

    def get_activation_shape(self, microbatch: Microbatch, sequence_ranks: int) -> torch.Size:
        """Return the shape of what enters or leaves a chunk of this rank, but for the ends."""
        batch, length = microbatch.tokens_BT.shape
        return torch.Size((batch, length // sequence_ranks, self.decoder.model.hidden))


ChunkMicrobatch = tuple[int, int]
"""A chunk and a microbatch."""


class _Kept(NamedTuple):
    """What a microbatch leaves in a chunk between its forward and its backward pass."""

    x: Tensor | None
    """The leaf it read; the first chunk has none."""
    end: GradientEdge | None
    """Where backward begins with the gradient of the next chunk."""
    loss: GradientEdge | None
    """Where it begins with the share of this step's loss."""


class StageExecutor:
    """Runs microbatches through chunks; gradients are left at the parameters."""

    def __init__(
        self, stage: PipelineStage, microbatches: Sequence[Microbatch], share: float | Tensor
    ) -> None:
        """`share` multiplies every loss before it is differentiated."""
        self.stage, self.microbatches = stage, microbatches
        device = microbatches[0].tokens_BT.device
        self._share = torch.as_tensor(share, dtype=torch.float32, device=device)
        self._kept: dict[ChunkMicrobatch, _Kept] = {}
        self._late: dict[ChunkMicrobatch, WeightGradStore] = {}
        self._nats: list[Tensor] = []
        self._auxiliary: list[Tensor] = []

    def forward_one_chunk(self, at: ChunkMicrobatch, x_BTD: Tensor | None) -> Tensor | None:
        """Return what the next chunk reads of a microbatch; nothing behind the last."""
        chunk, number = at
        if x_BTD is not None and torch.is_grad_enabled():
            x_BTD.requires_grad_()
        microbatch = self.microbatches[number]
        found = self.stage.forward_one_chunk(chunk, microbatch, x_BTD)
        if isinstance(found, BatchLoss):
            self._nats.append(found.loss_sum.detach())
            self._auxiliary.append(found.auxiliary_loss.detach())
            self._keep(_Kept(x_BTD, None, _edge(found.total)), at)
            return None
        balance = self.stage.compute_balance_loss(chunk, microbatch)
        if balance is not None:
            self._auxiliary.append(balance.detach())
        self._keep(_Kept(x_BTD, _edge(found), None if balance is None else _edge(balance)), at)
        return found.detach()

    def _keep(self, kept: _Kept, at: ChunkMicrobatch) -> None:
        if torch.is_grad_enabled():
            self._kept[at] = kept

    def backward_one_chunk(
        self, at: ChunkMicrobatch, grad_output_BTD: Tensor | None, *, weights: bool = True
    ) -> Tensor | None:
        """Return the gradient of what the chunk read, for the one before; none of the first.

        `grad_output_BTD` is that of its output. Without `weights` their gradients wait for
        `backward_weight_one_chunk`.
        """
        x, end, loss = self._kept.pop(at)
        begins = []
        if end is not None:
            assert grad_output_BTD is not None, "only the last chunk has a loss of its own"
            begins.append((end, grad_output_BTD))
        if loss is not None:
            begins.append((loss, self._share))
        if begins:
            edges, slopes = zip(*begins, strict=True)
            if weights:
                torch.autograd.backward(edges, slopes)
            else:
                with delay_wgrad_compute() as self._late[at]:
                    torch.autograd.backward(edges, slopes)
        elif not weights:
            self._late[at] = WeightGradStore()
        if x is None:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    def backward_weight_one_chunk(self, at: ChunkMicrobatch) -> None:
        """Add the weights' gradients that wait since a microbatch's backward pass."""
        self._late.pop(at).compute_all()

    def loss_sums(self) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy and what training adds to it, over all microbatches."""
        return self._sum(self._nats), self._sum(self._auxiliary)

    def _sum(self, losses: list[Tensor]) -> Tensor:
        if not losses:
            return torch.zeros((), device=self._share.device)
        return torch.stack(losses).sum()


def _edge(tensor: Tensor) -> GradientEdge | None:
    """Return where backward begins at a tensor; nowhere where it depends on nothing trained."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None
