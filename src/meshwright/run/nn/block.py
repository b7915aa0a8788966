"""`Block`: one layer of a decoder, a token mixer and a feed-forward part with norms around them.

The residual stream comes and goes as a pair, what the last branch gave and the stream before it;
the sum is made by the next norm (see `norm`).

Shapes: B sequences, T positions, D hidden.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.run.nn.attention import Attention
from meshwright.run.nn.experts import Experts
from meshwright.run.nn.gated_delta import GatedDelta
from meshwright.run.nn.latent import LatentAttention
from meshwright.run.nn.mamba2 import Mamba2
from meshwright.run.nn.mlp import Mlp
from meshwright.run.nn.norm import Norm
from meshwright.run.nn.positions import Places
from meshwright.run.nn.recompute import FULL, NOTHING, Op, Replay, dropped
from meshwright.spec.model import block, feedforward, mixers

Stream = tuple[Tensor, Tensor | None]
"""The last branch's output, and the stream it is still to be added to."""


def wanted_of(stream: Stream, wanted_W: Tensor) -> Stream:
    """Return the stream of some tokens."""
    branch, residual = stream
    kept = None if residual is None else residual.index_select(1, wanted_W)
    return branch.index_select(1, wanted_W), kept


class Block(nn.Module):
    """A layer as a model's `Block` describes it."""

    def __init__(
        self,
        spec: block.Block,
        hidden: int,
        norm: block.Norm,
        *,
        alibi: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.place = spec.norms
        self.recompute: frozenset[Op] = NOTHING
        self.whole: Op = "moe" if isinstance(spec.mlp, feedforward.Experts) else "mlp"
        """The operation that runs the feed-forward part again as a whole."""
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.mixer = _mixer(spec.mixer, hidden, norm, alibi, where)
        self.mlp = _feed_forward(spec.mlp, hidden, where)
        parts = {"mixer": self.mixer, "mlp": self.mlp}
        for part in parts.values():
            if isinstance(part, Attention | Mlp):
                part.reads_norm = spec.norms != "post"
        for name in (name for name, part in parts.items() if part is not None):
            before = spec.norms != "post" and (name, spec.norms) != ("mlp", "parallel-shared")
            if before:
                self.add_module(f"norm_{name}", Norm(hidden, norm, **where))
            if spec.norms in {"post", "sandwich"}:
                self.add_module(f"norm_{name}_after", Norm(hidden, norm, **where))

    def forward(self, branch: Tensor, residual: Tensor | None, places: Places) -> Stream:
        """Carry the stream through the layer."""
        if FULL not in self.recompute:
            return self._run(branch, residual, places)
        # Summed first: one tensor is kept for backward in place of two.
        total = branch if residual is None else branch + residual
        if self.place != "pre" or not isinstance(self.mlp, Mlp):
            found: Stream = Replay(self._run)(total, None, places)
            return found
        # Backward needs what the last product read, not what it gave: that one runs once.
        replay = Replay(self._to_last)
        inner, total = replay(self.mlp, total, places)
        with dropped((inner, replay.output)):
            return self.mlp.end(inner, at_hand=True), total

    def end(
        self, branch: Tensor, residual: Tensor | None, places: Places, wanted_W: Tensor
    ) -> Stream:
        """Carry the stream of one sequence through the last layer, for some of its tokens alone.

        The mixer sees all; nobody reads what the feed-forward part would make of the others.
        """
        if self.place in {"parallel", "parallel-shared"} or self.mlp is None or self.mixer is None:
            return wanted_of(self._run(branch, residual, places), wanted_W)
        stream = wanted_of(self._part("mixer", branch, residual, places), wanted_W)
        return self._part("mlp", *stream, places)

    def _to_last(self, mlp: Mlp, total: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Run the layer up to its last product; return what that reads, and the stream."""
        branch, residual = total, None
        if self.mixer is not None:
            branch, residual = self._part("mixer", total, None, places)
        norm: Norm = self.get_submodule("norm_mlp")  # type: ignore[assignment]
        normed, total = norm.add(branch, residual)
        return mlp.activate(mlp.raw(normed)), total

    def _run(self, branch: Tensor, residual: Tensor | None, places: Places) -> Stream:
        if self.place in {"parallel", "parallel-shared"}:
            return self._parallel(branch, residual, places)
        for name in ("mixer", "mlp"):
            if getattr(self, name) is not None:
                branch, residual = self._part(name, branch, residual, places)
        return branch, residual

    def _part(
        self, name: str, branch: Tensor, residual: Tensor | None, places: Places
    ) -> tuple[Tensor, Tensor]:
        """Run one part after the other: norm, part, norm, as far as the layer has them."""
        if self.place == "post":
            total = branch if residual is None else branch + residual
            branch = self._call(name, total, None, places)
        else:
            norm: Norm = getattr(self, f"norm_{name}")
            normed, total = norm.add(branch, residual)
            again = self._again(name, norm, total)
            branch = self._call(name, normed, again, places)
        if self.place != "pre":
            branch = getattr(self, f"norm_{name}_after")(branch)
        return branch, total

    def _parallel(self, branch: Tensor, residual: Tensor | None, places: Places) -> Stream:
        """Run both parts on the same stream and add what they give."""
        norm: Norm = self.get_submodule("norm_mixer")  # type: ignore[assignment]
        normed, total = norm.add(branch, residual)
        again = self._again("mixer", norm, total)
        mixed = self._call("mixer", normed, again, places)
        if self.place == "parallel":
            norm = self.get_submodule("norm_mlp")  # type: ignore[assignment]
            normed, again = norm(total), self._again("mlp", norm, total)
        return mixed + self._call("mlp", normed, again, places), total

    def _again(self, name: str, norm: Norm, total: Tensor) -> Callable[[], Tensor] | None:
        """Return how backward makes the norm before a part anew, where it shall."""
        runs_whole = name == "mlp" and self.whole in self.recompute
        if "layernorm" not in self.recompute and not runs_whole:
            return None
        kept = total.detach()
        return lambda: norm(kept)

    def _call(
        self, name: str, x_BTD: Tensor, again: Callable[[], Tensor] | None, places: Places
    ) -> Tensor:
        """Run the mixer or the feed-forward part; with `again`, what it reads is not kept."""
        part: Callable[..., Tensor] = getattr(self, name)
        if name == "mlp" and self.whole == "moe" and "moe" in self.recompute:
            part = Replay(part)
        inputs: tuple[Any, ...] = (x_BTD, places) if name == "mixer" else (x_BTD,)
        if again is None:
            return part(*inputs)
        with dropped((x_BTD, again)):
            return part(*inputs)


def _mixer(
    spec: mixers.Mixer | None, hidden: int, norm: block.Norm, alibi: bool, where: dict[str, Any]
) -> nn.Module | None:
    match spec:
        case mixers.Attention():
            return Attention(spec, hidden, norm, alibi=alibi, **where)
        case mixers.LatentAttention():
            return LatentAttention(spec, hidden, norm, **where)
        case mixers.GatedDelta():
            return GatedDelta(spec, hidden, norm, **where)
        case mixers.Mamba2():
            return Mamba2(spec, hidden, norm, **where)
        case None:
            return None


def _feed_forward(
    spec: feedforward.FeedForward | None, hidden: int, where: dict[str, Any]
) -> nn.Module | None:
    match spec:
        case feedforward.Mlp():
            return Mlp(spec, hidden, **where)
        case feedforward.Experts():
            return Experts(spec, hidden, **where)
        case None:
            return None
