"""`Stage`: the part of a decoder that one pipeline rank holds, chunk by chunk.

A rank's decoder keeps the names of the whole model and lacks the layers of others. A chunk is a run
of its layers; the first also embeds, the last also has the head. Between chunks travels one tensor,
the residual stream, summed.

Shapes: B sequences, T positions, D hidden.
"""

# ruff: noqa: N815  (letters of shapes)

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshwright.run.kernels.documents import Documents
from meshwright.run.kernels.labels import IGNORED
from meshwright.run.nn.block import Block, Stream
from meshwright.run.nn.decoder import Ahead, Decoder, Loss
from meshwright.run.nn.experts import Experts
from meshwright.run.nn.positions import Places
from meshwright.run.nn.recompute import use_recompute
from meshwright.spec.layout import Layout
from meshwright.spec.layout.stages import Chunk, rank_chunks


@dataclass(frozen=True, eq=False)
class Microbatch:
    """What a microbatch brings to every chunk it passes."""

    tokens_BT: Tensor
    labels_BT: Tensor
    positions_BT: Tensor | None = None
    documents: Documents | None = None
    """Of whole sequences, also where the tokens are a part of them."""
    whole: int | None = None
    """Tokens of a whole sequence, where these are a part of it."""
    ahead: Ahead | None = None
    """Tokens and labels that lie 1, 2, … places on, where these are not whole sequences."""
    source: object = None
    """What it was made of, for whoever judges it."""


Judge = Callable[[Tensor, Microbatch], Loss]
"""Returns the summed loss of a microbatch from what the output head reads of it."""


def keep_layers(decoder: Decoder, chunks: Sequence[Chunk]) -> None:
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


class Stage:
    """Runs the chunks of one pipeline rank."""

    def __init__(self, decoder: Decoder, layout: Layout, rank: int) -> None:
        """`rank` is the pipeline rank whose layers the decoder has."""
        self.decoder = decoder
        self.chunks = {
            chunk.position: chunk for chunk in rank_chunks(layout, decoder.model.layers)[rank]
        }
        # Matrices have the format of the stream; some vectors are kept wider.
        matrices = (each for each in decoder.parameters() if each.dim() > 1)
        self.dtype = next((each.dtype for each in matrices), torch.get_default_dtype())
        """Format of the stream."""
        self.judge: Judge | None = None
        """What is minimised in place of the cross-entropy of the labels."""
        for chunk in self.chunks.values():
            use_recompute(self.layers(chunk), layout)

    def forward(self, position: int, microbatch: Microbatch, x_BTD: Tensor | None) -> Tensor | Loss:
        """Run a chunk: return the stream for the next one, or the loss behind the last.

        The first chunk reads the tokens, every other `x_BTD`.
        """
        decoder, chunk = self.decoder, self.chunks[position]
        places = self._places(microbatch)
        if chunk.has_embedding:
            stream: Stream = (decoder.embed(microbatch.tokens_BT, places), None)
        else:
            assert x_BTD is not None, "only the first chunk reads tokens"
            stream = (x_BTD, None)
        for layer in self.layers(chunk):
            stream = layer(*stream, places)
        if chunk.has_head and self.judge is not None:
            return self.judge(decoder.finish(*stream), microbatch)
        if chunk.has_head:
            given = (microbatch.tokens_BT, microbatch.labels_BT)
            return decoder.end(stream, *given, places, microbatch.ahead)
        branch, residual = stream
        return branch if residual is None else branch + residual

    def balance_loss(self, position: int, microbatch: Microbatch) -> Tensor | None:
        """Return what the routed layers of a chunk without the head lose by unequal use.

        Asked behind the chunk's forward pass, once. Behind the last chunk it is part of the loss.
        """
        weight = self.decoder.balance_weight
        if not weight or not self.decoder.training or self.judge is not None:
            return None
        losses = []
        for layer in self.layers(self.chunks[position]):
            part = layer.mlp
            if isinstance(part, Experts) and part.balance_loss is not None:
                losses.append(part.balance_loss)
                part.balance_loss = None
        if not losses:
            return None
        count = (microbatch.labels_BT != IGNORED).sum()
        return weight * count * torch.stack(losses).sum()

    def layers(self, chunk: Chunk) -> list[Block]:
        """Return the layers of a chunk."""
        return [
            self.decoder.get_submodule(f"layers.{index}")  # type: ignore[misc]  # it is a Block
            for index in range(chunk.first, chunk.last)
        ]

    def _places(self, microbatch: Microbatch) -> Places:
        return Places(
            self.decoder.tables,
            microbatch.tokens_BT,
            positions=microbatch.positions_BT,
            documents=microbatch.documents,
            whole=microbatch.whole,
        )

    def boundary_shape(self, microbatch: Microbatch, sequence_ranks: int) -> torch.Size:
        """Return the shape of what enters or leaves a chunk of this rank, but for the ends."""
        batch, length = microbatch.tokens_BT.shape
        return torch.Size((batch, length // sequence_ranks, self.decoder.model.hidden))
