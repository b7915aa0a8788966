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
from meshwright.run.kernels.attention import attention
from meshwright.run.kernels.labels import IGNORED
from meshwright.run.nn.attention import Attention
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.gated_delta import GatedDelta
from meshwright.run.nn.latent import LatentAttention
from meshwright.run.nn.mamba2 import Mamba2
from meshwright.run.nn.multi_token import later
from meshwright.run.nn.passage import Passage
from meshwright.run.parallel.attention_block import Asked, Given
from meshwright.run.parallel.flow import gather_in
from meshwright.run.parallel.gathered import gathered_attention
from meshwright.run.parallel.group import Group
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.ring_attention import ring_attention
from meshwright.run.parallel.stage import Microbatch
from meshwright.run.parallel.token_order import TokenOrder
from meshwright.run.parallel.ulysses import ulysses_attention
from meshwright.spec.layout import Layout
from meshwright.spec.layout.rules import largest_divisor, nearest_multiple
from meshwright.spec.model import Model, mixers

TOKENS = 1
"""The axis of tokens in (B, T, …)."""
TRADERS = 2
"""Neighbours that trade heads under `ring+ulysses`; Megatron's files get the same number."""


def order_of(layout: Layout, length: int) -> TokenOrder:
    """Return which tokens of sequences of this length each context-parallel rank has.

    Raises:
        InputError: the length does not divide among the ranks.
    """
    ranks, kind = layout.cp, layout.cp_kind
    split = layout.tp if layout.sequence_parallel else 1
    order = TokenOrder.in_a_row(ranks)
    if "ring" in kind:
        order = TokenOrder.zigzag(ranks // traders(layout), traders(layout))
    elif kind == "allgather" and length % (2 * ranks * split) == 0:
        order = TokenOrder.zigzag(ranks)
    step = order.count * split
    if length % step:
        what = f"{length} does not divide into the {step} parts of cp and sequence parallel"
        fix = f"use {nearest_multiple(length, step)}"
        raise InputError([Problem("sequence_length", what, fix)])
    return order


def traders(layout: Layout) -> int:
    """Return how many neighbouring ranks trade heads with each other."""
    if layout.cp_kind == "ulysses":
        return layout.cp
    return TRADERS if layout.cp_kind == "ring+ulysses" and layout.cp % TRADERS == 0 else 1


def problems(model: Model, layout: Layout) -> list[Problem]:
    """Return what keeps a model's attention from being shared as a layout says."""
    found, ranks = [], traders(layout)
    for block, _ in model.block_counts():
        mixer = block.mixer
        if layout.cp == 1 or not isinstance(mixer, mixers.Attention | mixers.LatentAttention):
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
    smaller = [tp for tp in range(1, layout.tp) if heads % (tp * traders(layout)) == 0]
    if smaller:
        ways.append(f"tp={smaller[-1]}")
    return f"use {', or '.join(ways)}"


class Ring:
    """Attention by a ring."""

    def __init__(self, group: Group) -> None:
        self.group, self.order = group, TokenOrder.zigzag(group.size)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sinks: Tensor | None = None,
        **asked: Unpack[Asked],
    ) -> Tensor:
        """Return this rank's tokens of an attention over whole sequences."""
        return self.run(Given(q, k, v, sinks), asked)

    def run(self, given: Given, asked: Asked) -> Tensor:
        """Do the same; where blocks would have to be written out on a GPU, find another way."""
        here = (self.group, self.order)
        if given.q.is_cuda and _beyond_ring(asked):
            # No fused kernel caps scores or slopes them, but whole sequences have a compiled one.
            whole = asked.get("softcap") is not None or asked.get("alibi") is not None
            if whole and given.q.shape[2] % self.group.size == 0:
                return ulysses_attention(given, asked, *here, _whole_attention)
            return gathered_attention(given, asked, *here)
        return ring_attention(given, asked, *here)


class Gathered:
    """Attention to gathered keys and values."""

    def __init__(self, group: Group, layout: Layout) -> None:
        self.group, self.layout = group, layout

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sinks: Tensor | None = None,
        **asked: Unpack[Asked],
    ) -> Tensor:
        """Return this rank's tokens of an attention over whole sequences."""
        order = order_of(self.layout, q.shape[TOKENS] * self.group.size)
        return gathered_attention(Given(q, k, v, sinks), asked, self.group, order)


class Ulysses:
    """Attention with some of the heads, to whole sequences or to those of a ring's place."""

    def __init__(self, group: Group, ring: Ring | None = None) -> None:
        self.group, self.order = group, TokenOrder.in_a_row(group.size)
        self.inner = _whole_attention if ring is None else ring.run

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        sinks: Tensor | None = None,
        **asked: Unpack[Asked],
    ) -> Tensor:
        """Return this rank's tokens of an attention over whole sequences."""
        given = Given(q, k, v, sinks)
        return ulysses_attention(given, asked, self.group, self.order, self.inner)


class WholeSequences:
    """The passage of a mixer that reads all tokens: every rank runs it, and keeps its own tokens.

    Each rank's gradients are those of its own tokens' results, so they add up as all others do.
    """

    gathers = True

    def __init__(self, group: Group, layout: Layout, inner: Passage | None) -> None:
        """`inner` is the passage through the tensor-parallel ranks."""
        self.group, self.layout, self.inner = group, layout, inner

    def enter(self, x: Tensor) -> Tensor:
        """Gather the tokens of all ranks, in order."""
        here = x if self.inner is None else self.inner.enter(x)
        return self._order(here).join(gather_in(here, self.group, TOKENS), TOKENS)

    def again(self, x: Tensor) -> Tensor:
        """Gather them once more."""
        here = x if self.inner is None else self.inner.again(x)
        return self._order(here).join(self.group.all_gather(here, TOKENS), TOKENS)

    def leave(self, y: Tensor) -> Tensor:
        """Keep this rank's tokens."""
        mine = order_of(self.layout, y.shape[TOKENS]).take(y, self.group.index, TOKENS)
        return mine if self.inner is None else self.inner.leave(mine)

    def _order(self, here: Tensor) -> TokenOrder:
        return order_of(self.layout, here.shape[TOKENS] * self.group.size)


def share_context(decoder: Decoder, mesh: Mesh) -> None:
    """Let the mixers of a decoder see the tokens of other ranks; follows `share_tensors`."""
    layout, group = mesh.layout, mesh["cp"]
    if group.size == 1:
        return
    across = _across(mesh)
    for module in decoder.modules():
        match module:
            case Attention() | LatentAttention():
                module.across = across
            case Mamba2() | GatedDelta():
                module.passage = WholeSequences(group, layout, module.passage)


def _across(mesh: Mesh) -> Ring | Gathered | Ulysses:
    layout, group, count = mesh.layout, mesh["cp"], traders(mesh.layout)
    if layout.cp_kind == "allgather":
        return Gathered(group, layout)
    if count == group.size:
        return Ulysses(group)
    if count == 1:
        return Ring(group)
    return Ulysses(mesh.neighbours("cp", count), Ring(mesh.counterparts("cp", count)))


def _beyond_ring(asked: Asked) -> bool:
    """Say whether blocks of a ring would have no fused kernel."""
    return any(asked.get(name) is not None for name in ("window", "chunk", "softcap", "alibi"))


def _whole_attention(given: Given, asked: Asked) -> Tensor:
    return attention(given.q, given.k, given.v, sinks=given.sinks, **asked)


class _Spread(Protocol):
    """What cutting needs to know of a rank; see `spread.Spread`."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def decoder(self) -> Decoder: ...


def cut(microbatches: Sequence[Microbatch], spread: _Spread) -> Sequence[Microbatch]:
    """Return this rank's tokens of whole microbatches; documents remain those of the whole."""
    mesh = spread.mesh
    if mesh.layout.cp == 1:
        return microbatches
    further = len(spread.decoder.multi_token)
    return [cut_tokens(each, mesh.layout, mesh["cp"].index, further) for each in microbatches]


def cut_tokens(microbatch: Microbatch, layout: Layout, index: int, further: int = 0) -> Microbatch:
    """Return the tokens of one context-parallel rank, with positions in the whole.

    `further` tokens ahead of each are looked up first, as they may lie with other ranks.
    """
    tokens, labels, documents = microbatch.tokens_BT, microbatch.labels_BT, microbatch.documents
    batch, length = tokens.shape
    order = order_of(layout, length)
    positions = microbatch.positions_BT
    if positions is None and documents is not None:
        positions = documents.positions(batch, length)
    if positions is None:
        positions = torch.arange(length, device=tokens.device)[None]
    ids = None if documents is None else documents.ids(batch, length)
    ahead = [
        (later(tokens, steps, 0, ids), later(labels, steps, IGNORED, ids))
        for steps in range(1, further + 1)
    ]
    return replace(
        microbatch,
        tokens_BT=order.take(tokens, index),
        labels_BT=order.take(labels, index),
        positions_BT=order.take(positions, index),
        whole=length,
        ahead=tuple((order.take(one, index), order.take(two, index)) for one, two in ahead),
    )
