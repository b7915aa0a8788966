"""Tensor parallelism: ranks share the heads and the inner width of each part of a layer.

A part's result is a sum over the ranks. With sequence parallelism each rank keeps only its share of
the tokens between the parts, so norms and residuals are not done twice: tokens are gathered on the
way in and the sum is scattered on the way out (Korthikanti et al., arXiv 2205.05198).
"""

from functools import partial

from torch import Tensor, nn

from meshwright.errors import Problem
from meshwright.run.nn.attention import Attention
from meshwright.run.nn.block import Block
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.gated_delta import GatedDelta
from meshwright.run.nn.latent import LatentAttention
from meshwright.run.nn.linear import Linear
from meshwright.run.nn.mamba2 import Mamba2
from meshwright.run.nn.mlp import Mlp
from meshwright.run.parallel.decomposed import gather_product, product_scatter
from meshwright.run.parallel.flow import copy_in, gather_in, scatter_out, sum_out
from meshwright.run.parallel.group import Group
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.vocabulary import WordsOfRanks
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model

TOKENS = 1
"""The axis of tokens in (B, T, D)."""


class Shared:
    """The passage of a part whose ranks all have all tokens."""

    gathers = False

    def __init__(self, group: Group) -> None:
        self.group = group

    def enter(self, x: Tensor) -> Tensor:
        """Hand on what all ranks have."""
        return copy_in(x, self.group)

    def again(self, x: Tensor) -> Tensor:
        """Return the same."""
        return x

    def leave(self, y: Tensor) -> Tensor:
        """Add up the ranks' parts."""
        return sum_out(y, self.group)


class SharedTokens:
    """The passage of a part whose ranks have a share of the tokens before and after it."""

    gathers = True

    def __init__(self, group: Group, axis: int = TOKENS) -> None:
        self.group, self.axis = group, axis

    def enter(self, x: Tensor) -> Tensor:
        """Gather the tokens of all ranks."""
        return gather_in(x, self.group, self.axis)

    def again(self, x: Tensor) -> Tensor:
        """Gather them once more."""
        return self.group.all_gather(x, self.axis)

    def leave(self, y: Tensor) -> Tensor:
        """Add up the ranks' parts and keep this rank's tokens."""
        return scatter_out(y, self.group, self.axis)


Passages = Shared | SharedTokens


def share_tensors(decoder: Decoder, mesh: Mesh) -> None:
    """Let the parts of a decoder work on what `holdings` leaves to this rank."""
    group, layout = mesh["tp"], mesh.layout
    if group.size == 1:
        return
    passage: Passages = SharedTokens(group) if layout.sequence_parallel else Shared(group)
    for module in decoder.modules():
        _share(module, passage, group)
    if layout.overlap_tp and layout.sequence_parallel:
        for layer in decoder.modules():
            if isinstance(layer, Block):
                _in_pieces(layer, group)
    words = WordsOfRanks(group, decoder.model.vocab, sequence=layout.sequence_parallel)
    # Stages between the ends have neither.
    if hasattr(decoder, "embedding"):
        decoder.embedding.lookup = words.lookup
    if hasattr(decoder, "head"):
        decoder.head.shared = words
    if hasattr(decoder, "positions") and layout.sequence_parallel:
        decoder.positions.lookup = words.lookup_part


def _in_pieces(layer: Block, group: Group) -> None:
    """Let the products of a layer exchange tokens piece by piece, where one product reads them."""
    parts: list[tuple[Attention | Mlp, Linear, Linear]] = []
    if isinstance(layer.mixer, Attention):
        parts.append((layer.mixer, layer.mixer.qkv, layer.mixer.o))
    if isinstance(layer.mlp, Mlp):
        first = layer.mlp.gate_up if layer.mlp.gated else layer.mlp.up
        parts.append((layer.mlp, first, layer.mlp.down))
    for part, first, last in parts:
        part.passage = None  # the products themselves are the way in and out
        first.across, last.across = partial(gather_product, group), partial(product_scatter, group)


def _share(module: nn.Module, passage: Passages, group: Group) -> None:
    last: Linear | None = None
    match module:
        case Attention():
            spec = module.spec
            module.first_head = group.index * spec.heads // group.size
            module.heads = spec.heads // group.size
            module.kv_heads = max(1, spec.kv_heads // group.size)
            module.kv_copies = max(1, group.size // spec.kv_heads)
            module.total = group.all_reduce
            module.passage, last = passage, module.o
        case LatentAttention() | GatedDelta():
            module.passage, last = passage, module.o
        case Mamba2():
            module.passage, last = passage, module.out
        case Mlp():
            module.passage, last = passage, module.down
    if last is not None:
        last.adds_bias = group.index == 0


def problems(_: Model, layout: Layout) -> list[Problem]:
    """Return what of a layout tensor parallelism cannot do yet, each with a fix."""
    found = []
    if layout.overlap_tp and layout.precision.startswith("fp8"):
        what = f"{layout.precision} products are not cut into pieces that overlap"
        found.append(Problem("layout.overlap_tp", what, "leave it out, or use bf16"))
    if layout.overlap_tp and layout.tp > 1 and not layout.sequence_parallel:
        what = "products overlap with the exchange of tokens, which every rank has here"
        found.append(Problem("layout.overlap_tp", what, "set sequence_parallel = true"))
    return found
