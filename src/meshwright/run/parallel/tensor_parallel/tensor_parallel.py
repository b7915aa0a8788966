"""Tensor parallelism: ranks share the heads and the inner width of each part of a layer.

A part's result is a sum over the ranks. With sequence parallelism each rank keeps only its share of
the tokens between the parts, so norms and residuals are not done twice: tokens are gathered on the
way in and the sum is scattered on the way out (Korthikanti et al., arXiv 2205.05198).
"""

from functools import partial

from torch import Tensor, nn

from meshwright.errors import Problem
from meshwright.run.nn.attention.mla import MLASelfAttention
from meshwright.run.nn.attention.self_attention import SelfAttention
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_layer import DecoderLayer
from meshwright.run.nn.linear.linear import Linear
from meshwright.run.nn.mlp import MLPLayer
from meshwright.run.nn.ssm.gated_delta_net import GatedDeltaNet
from meshwright.run.nn.ssm.mamba2 import Mamba2Mixer
from meshwright.run.parallel.autograd_collectives import (
    copy_to_region,
    gather_from_sequence_region,
    reduce_from_region,
    reduce_scatter_to_sequence_region,
)
from meshwright.run.parallel.group_coordinator import GroupCoordinator
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.tensor_parallel.tp_overlap import (
    all_gather_matmul,
    matmul_reduce_scatter,
)
from meshwright.run.parallel.tensor_parallel.vocab_parallel import VocabParallel
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model

SEQUENCE_DIM = 1
"""The axis of tokens in (B, T, D)."""


class AllReduceHooks:
    """The passage of a part whose ranks all have all tokens."""

    gathers_input = False

    def __init__(self, group: GroupCoordinator) -> None:
        self.group = group

    def gather_input(self, x: Tensor) -> Tensor:
        """Hand on what all ranks have."""
        return copy_to_region(x, self.group)

    def regather_input(self, x: Tensor) -> Tensor:
        """Return the same."""
        return x

    def reduce_output(self, y: Tensor) -> Tensor:
        """Add up the ranks' parts."""
        return reduce_from_region(y, self.group)


class SequenceParallelHooks:
    """The passage of a part whose ranks have a share of the tokens before and after it."""

    gathers_input = True

    def __init__(self, group: GroupCoordinator, dim: int = SEQUENCE_DIM) -> None:
        self.group, self.dim = group, dim

    def gather_input(self, x: Tensor) -> Tensor:
        """Gather the tokens of all ranks."""
        return gather_from_sequence_region(x, self.group, self.dim)

    def regather_input(self, x: Tensor) -> Tensor:
        """Gather them once more."""
        return self.group.all_gather(x, self.dim)

    def reduce_output(self, y: Tensor) -> Tensor:
        """Add up the ranks' parts and keep this rank's tokens."""
        return reduce_scatter_to_sequence_region(y, self.group, self.dim)


TensorParallelHooks = AllReduceHooks | SequenceParallelHooks


def apply_tensor_parallel(decoder: Decoder, mesh: Mesh) -> None:
    """Let the parts of a decoder work on what `shard_specs` leaves to this rank."""
    group, layout = mesh["tp"], mesh.layout
    if group.size == 1:
        return
    passage: TensorParallelHooks = (
        SequenceParallelHooks(group) if layout.sequence_parallel else AllReduceHooks(group)
    )
    for module in decoder.modules():
        _share(module, passage, group)
    if layout.overlap_tp and layout.sequence_parallel:
        for layer in decoder.modules():
            if isinstance(layer, DecoderLayer):
                _in_pieces(layer, group)
    words = VocabParallel(group, decoder.model.vocab, sequence_parallel=layout.sequence_parallel)
    # Stages between the ends have neither.
    if hasattr(decoder, "embedding"):
        decoder.embedding.parallel_lookup = words.lookup
    if hasattr(decoder, "head"):
        decoder.head.vocab_parallel = words
    if hasattr(decoder, "positions") and layout.sequence_parallel:
        decoder.positions.parallel_lookup = words.lookup_sequence_shard


def _in_pieces(layer: DecoderLayer, group: GroupCoordinator) -> None:
    """Let the products of a layer exchange tokens piece by piece, where one product reads them."""
    parts: list[tuple[SelfAttention | MLPLayer, Linear, Linear]] = []
    if isinstance(layer.mixer, SelfAttention):
        parts.append((layer.mixer, layer.mixer.qkv, layer.mixer.o))
    if isinstance(layer.mlp, MLPLayer):
        first = layer.mlp.gate_up if layer.mlp.is_gated else layer.mlp.up
        parts.append((layer.mlp, first, layer.mlp.down))
    for part, first, last in parts:
        part.parallel_hooks = None  # the products themselves are the way in and out
        first.tp_overlap, last.tp_overlap = (
            partial(all_gather_matmul, group),
            partial(matmul_reduce_scatter, group),
        )


def _share(module: nn.Module, passage: TensorParallelHooks, group: GroupCoordinator) -> None:
    last: Linear | None = None
    match module:
        case SelfAttention():
            spec = module.spec
            module.first_head = group.index * spec.heads // group.size
            module.heads = spec.heads // group.size
            module.kv_heads = max(1, spec.kv_heads // group.size)
            module.kv_replicas = max(1, group.size // spec.kv_heads)
            module.all_reduce_sum = group.all_reduce
            module.parallel_hooks, last = passage, module.o
        case MLASelfAttention() | GatedDeltaNet():
            module.parallel_hooks, last = passage, module.o
        case Mamba2Mixer():
            module.parallel_hooks, last = passage, module.out
        case MLPLayer():
            module.parallel_hooks, last = passage, module.down
    if last is not None:
        last.adds_bias = group.index == 0


def find_tensor_parallel_problems(_: Model, layout: Layout) -> list[Problem]:
    """Return what of a layout tensor parallelism cannot do yet, each with a fix."""
    found = []
    if layout.overlap_tp and layout.precision.startswith("fp8"):
        what = f"{layout.precision} GEMMs are not split into chunks that overlap"
        found.append(Problem("layout.overlap_tp", what, "leave it out, or use bf16"))
    if layout.overlap_tp and layout.tp > 1 and not layout.sequence_parallel:
        what = "GEMMs overlap with all-gathers of tokens, but every rank has all tokens here"
        found.append(Problem("layout.overlap_tp", what, "set sequence_parallel = true"))
    return found
