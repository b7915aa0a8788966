"""Context parallelism: ranks share the tokens of each sequence.

Everything but the mixing of tokens works on a rank's own tokens. Attention sees those of others as
the layout's `cp_kind` says; mixers with a state that runs along the sequence get all tokens, and
each rank keeps its own of what they give.

    ring           keys and values go round                       an early and a late run of tokens
    allgather      every rank has all keys and values             the same, where lengths divide
    ulysses        every rank has all tokens of some heads        one run of tokens
    ring+ulysses   pairs of neighbours trade heads, rings go across them
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, Unpack

import torch
from torch import Tensor

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.attention.sdpa import attention
from meshwright.run.kernels.loss.ignore_index import IGNORE_INDEX
from meshwright.run.nn.attention.mla import MLASelfAttention
from meshwright.run.nn.attention.self_attention import SelfAttention
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.multi_token_prediction import shift_tokens
from meshwright.run.nn.sharding.parallel_hooks import ParallelHooks
from meshwright.run.nn.ssm.gated_delta_net import GatedDeltaNet
from meshwright.run.nn.ssm.mamba2 import Mamba2Mixer
from meshwright.run.parallel.autograd_collectives import gather_from_sequence_region
from meshwright.run.parallel.context_parallel.all_gather_attention import all_gather_attention
from meshwright.run.parallel.context_parallel.partial_attention import (
    AttentionInputs,
    AttentionOptions,
)
from meshwright.run.parallel.context_parallel.ring_attention import ring_attention
from meshwright.run.parallel.context_parallel.token_partition import TokenPartition
from meshwright.run.parallel.context_parallel.ulysses import ulysses_attention
from meshwright.run.parallel.group_coordinator import GroupCoordinator
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.microbatch import Microbatch
from meshwright.spec.layout import Layout
from meshwright.spec.layout.field_rules import largest_divisor, nearest_multiple
from meshwright.spec.model import Model, token_mixers

SEQUENCE_DIM = 1
"""The axis of tokens in (B, T, …)."""
ULYSSES_DIM = 2
"""Neighbours that trade heads under `ring+ulysses`; Megatron's files get the same number."""


def make_token_partition(layout: Layout, length: int) -> TokenPartition:
    """Return which tokens of sequences of this length each context-parallel rank has.

    Raises:
        InputError: the length does not divide among the ranks.
    """
    ranks, kind = layout.cp, layout.cp_kind
    split = layout.tp if layout.sequence_parallel else 1
    order = TokenPartition.contiguous(ranks)
    if "ring" in kind:
        order = TokenPartition.zigzag(
            ranks // get_ulysses_degree(layout), get_ulysses_degree(layout)
        )
    elif kind == "allgather" and length % (2 * ranks * split) == 0:
        order = TokenPartition.zigzag(ranks)
    step = order.num_pieces * split
    if length % step:
        what = f"{length} does not divide into the {step} parts of cp and sequence parallel"
        fix = f"use {nearest_multiple(length, step)}"
        raise InputError([Problem("sequence_length", what, fix)])
    return order


def get_ulysses_degree(layout: Layout) -> int:
    """Return how many neighbouring ranks trade heads with each other."""
    if layout.cp_kind == "ulysses":
        return layout.cp
    return ULYSSES_DIM if layout.cp_kind == "ring+ulysses" and layout.cp % ULYSSES_DIM == 0 else 1


def find_context_parallel_problems(model: Model, layout: Layout) -> list[Problem]:
    """Return what keeps a model's attention from being shared as a layout says."""
    found, ranks = [], get_ulysses_degree(layout)
    for block, _ in model.count_layers_by_block():
        mixer = block.mixer
        if layout.cp == 1 or not isinstance(
            mixer, token_mixers.AttentionSpec | token_mixers.LatentAttentionSpec
        ):
            continue
        each, over = divmod(mixer.heads, layout.tp)
        if over or each % ranks == 0:  # heads that tp does not divide are tp's own fault
            continue
        what = (
            f"{layout.cp_kind} shares the {mixer.heads} heads of block {block.name} among "
            f"tp={layout.tp} × {ranks} ranks, which does not divide them"
        )
        # `Layout.check` names the first field for this fault as well.
        where = "layout.cp" if layout.cp_kind == "ulysses" else "layout.cp_kind"
        found.append(Problem(where, what, _other_ways(layout, mixer.heads)))
    return found


def _other_ways(layout: Layout, heads: int) -> str:
    """Say which layouts near to one would share so many heads."""
    ways = ["cp_kind=ring or allgather"]
    fewer = largest_divisor(heads // layout.tp, layout.cp)
    if layout.cp_kind == "ulysses" and fewer > 1:
        ways.append(f"cp={fewer}")
    smaller = [tp for tp in range(1, layout.tp) if heads % (tp * get_ulysses_degree(layout)) == 0]
    if smaller:
        ways.append(f"tp={smaller[-1]}")
    return f"use {', or '.join(ways)}"


class RingAttention:
    """Attention by a ring."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.group, self.token_partition = group, TokenPartition.zigzag(group.size)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sinks: Tensor | None = None,
        **asked: Unpack[AttentionOptions],
    ) -> Tensor:
        """Return this rank's tokens of an attention over whole sequences."""
        return self.run(AttentionInputs(q, k, v, sinks), asked)

    def run(self, given: AttentionInputs, asked: AttentionOptions) -> Tensor:
        """Do the same; where blocks would have to be written out on a GPU, find another way."""
        here = (self.group, self.token_partition)
        if given.q.is_cuda and _beyond_ring(asked):
            # No fused kernel caps scores or slopes them, but whole sequences have a compiled one.
            whole = asked.get("softcap") is not None or asked.get("alibi") is not None
            if whole and given.q.shape[2] % self.group.size == 0:
                return ulysses_attention(given, asked, *here, _whole_attention)
            return all_gather_attention(given, asked, *here)
        return ring_attention(given, asked, *here)


class AllGatherAttention:
    """Attention to gathered keys and values."""

    def __init__(self, group: GroupCoordinator, layout: Layout) -> None:
        self.group, self.layout = group, layout

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sinks: Tensor | None = None,
        **asked: Unpack[AttentionOptions],
    ) -> Tensor:
        """Return this rank's tokens of an attention over whole sequences."""
        order = make_token_partition(self.layout, q.shape[SEQUENCE_DIM] * self.group.size)
        return all_gather_attention(AttentionInputs(q, k, v, sinks), asked, self.group, order)


class UlyssesAttention:
    """Attention with some of the heads, to whole sequences or to those of a ring's place."""

    def __init__(self, group: GroupCoordinator, ring: RingAttention | None = None) -> None:
        self.group, self.token_partition = group, TokenPartition.contiguous(group.size)
        self.inner_attention = _whole_attention if ring is None else ring.run

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sinks: Tensor | None = None,
        **asked: Unpack[AttentionOptions],
    ) -> Tensor:
        """Return this rank's tokens of an attention over whole sequences."""
        given = AttentionInputs(q, k, v, sinks)
        return ulysses_attention(
            given, asked, self.group, self.token_partition, self.inner_attention
        )


class FullSequenceHooks:
    """The passage of a mixer that reads all tokens: every rank runs it, and keeps its own tokens.

    Each rank's gradients are those of its own tokens' results, so they add up as all others do.
    """

    gathers_input = True

    def __init__(
        self, group: GroupCoordinator, layout: Layout, inner_hooks: ParallelHooks | None
    ) -> None:
        """`inner_hooks` is the passage through the tensor-parallel ranks."""
        self.group, self.layout, self.inner_hooks = group, layout, inner_hooks

    def gather_input(self, x: Tensor) -> Tensor:
        """Gather the tokens of all ranks, in order."""
        here = x if self.inner_hooks is None else self.inner_hooks.gather_input(x)
        return self._order(here).to_full_sequence(
            gather_from_sequence_region(here, self.group, SEQUENCE_DIM), SEQUENCE_DIM
        )

    def regather_input(self, x: Tensor) -> Tensor:
        """Gather them once more."""
        here = x if self.inner_hooks is None else self.inner_hooks.regather_input(x)
        return self._order(here).to_full_sequence(
            self.group.all_gather(here, SEQUENCE_DIM), SEQUENCE_DIM
        )

    def reduce_output(self, y: Tensor) -> Tensor:
        """Keep this rank's tokens."""
        mine = make_token_partition(self.layout, y.shape[SEQUENCE_DIM]).select_local_tokens(
            y, self.group.index, SEQUENCE_DIM
        )
        return mine if self.inner_hooks is None else self.inner_hooks.reduce_output(mine)

    def _order(self, here: Tensor) -> TokenPartition:
        return make_token_partition(self.layout, here.shape[SEQUENCE_DIM] * self.group.size)


def apply_context_parallel(decoder: Decoder, mesh: Mesh) -> None:
    """Let the mixers of a decoder see tokens of other ranks; call after `apply_tensor_parallel`."""
    layout, group = mesh.layout, mesh["cp"]
    if group.size == 1:
        return
    across = _across(mesh)
    for module in decoder.modules():
        match module:
            case SelfAttention() | MLASelfAttention():
                module.core_attention = across
            case Mamba2Mixer() | GatedDeltaNet():
                module.parallel_hooks = FullSequenceHooks(group, layout, module.parallel_hooks)


def _across(mesh: Mesh) -> RingAttention | AllGatherAttention | UlyssesAttention:
    layout, group, count = mesh.layout, mesh["cp"], get_ulysses_degree(mesh.layout)
    if layout.cp_kind == "allgather":
        return AllGatherAttention(group, layout)
    if count == group.size:
        return UlyssesAttention(group)
    if count == 1:
        return RingAttention(group)
    return UlyssesAttention(
        mesh.get_subgroup("cp", count), RingAttention(mesh.get_cross_group("cp", count))
    )


def _beyond_ring(asked: AttentionOptions) -> bool:
    """Say whether blocks of a ring would have no fused kernel."""
    return any(asked.get(name) is not None for name in ("window", "chunk", "softcap", "alibi"))


def _whole_attention(given: AttentionInputs, asked: AttentionOptions) -> Tensor:
    return attention(given.q, given.k, given.v, sinks=given.sinks, **asked)


class _Spread(Protocol):
    """What splitting needs to know of a rank; see `ShardedModel`."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def decoder(self) -> Decoder: ...


def split_microbatches(
    microbatches: Sequence[Microbatch], sharded_model: _Spread
) -> Sequence[Microbatch]:
    """Return this rank's tokens of whole microbatches; documents remain those of the whole."""
    mesh = sharded_model.mesh
    if mesh.layout.cp == 1:
        return microbatches
    further = len(sharded_model.decoder.multi_token)
    return [split_tokens(each, mesh.layout, mesh["cp"].index, further) for each in microbatches]


def split_tokens(
    microbatch: Microbatch, layout: Layout, index: int, further: int = 0
) -> Microbatch:
    """Return the tokens of one context-parallel rank, with positions in the whole.

    `further` tokens ahead of each are looked up first, as they may lie with other ranks.
    """
    tokens, labels, documents = microbatch.tokens_BT, microbatch.labels_BT, microbatch.documents
    batch, length = tokens.shape
    order = make_token_partition(layout, length)
    positions = microbatch.positions_BT
    if positions is None and documents is not None:
        positions = documents.positions(batch, length)
    if positions is None:
        positions = torch.arange(length, device=tokens.device)[None]
    ids = None if documents is None else documents.ids(batch, length)
    ahead = [
        (shift_tokens(tokens, steps, 0, ids), shift_tokens(labels, steps, IGNORE_INDEX, ids))
        for steps in range(1, further + 1)
    ]
    return replace(
        microbatch,
        tokens_BT=order.select_local_tokens(tokens, index),
        labels_BT=order.select_local_tokens(labels, index),
        positions_BT=order.select_local_tokens(positions, index),
        full_sequence_length=length,
        future_tokens=tuple(
            (order.select_local_tokens(one, index), order.select_local_tokens(two, index))
            for one, two in ahead
        ),
    )
