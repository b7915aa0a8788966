"""`DecoderLayer`: one layer of a decoder: a token mixer and a feed-forward part with norms.

The residual stream comes and goes as a pair, what the last branch gave and the stream before it;
the sum is made by the next norm (see `norm`).

Shapes: B sequences, T positions, D hidden.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.run.nn.attention.mla import MLASelfAttention
from meshwright.run.nn.attention.self_attention import SelfAttention
from meshwright.run.nn.mlp import MLPLayer
from meshwright.run.nn.moe.moe_layer import MoELayer
from meshwright.run.nn.norm import NormLayer
from meshwright.run.nn.positions import PositionInfo
from meshwright.run.nn.recompute import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    RecomputedFunction,
    RecomputeOpOrFull,
    drop_saved_tensors,
)
from meshwright.run.nn.ssm.gated_delta_net import GatedDeltaNet
from meshwright.run.nn.ssm.mamba2 import Mamba2Mixer
from meshwright.spec.model import block, feedforward, token_mixers

ResidualStream = tuple[Tensor, Tensor | None]
"""The last branch's output, and the stream it is still to be added to."""


def select_tokens(stream: ResidualStream, wanted_W: Tensor) -> ResidualStream:
    """Return the stream of some tokens."""
    branch, residual = stream
    kept = None if residual is None else residual.index_select(1, wanted_W)
    return branch.index_select(1, wanted_W), kept


class DecoderLayer(nn.Module):
    """A layer as a model's `BlockSpec` describes it."""

    def __init__(
        self,
        spec: block.BlockSpec,
        hidden: int,
        norm: block.NormSpec,
        *,
        alibi: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.norm_placement = spec.norms
        self.recompute: frozenset[RecomputeOpOrFull] = NO_RECOMPUTE
        self.mlp_recompute_op: RecomputeOpOrFull = (
            "moe" if isinstance(spec.mlp, feedforward.MoESpec) else "mlp"
        )
        """The operation that runs the feed-forward part again as a whole."""
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.mixer = _mixer(spec.mixer, hidden, norm, alibi, where)
        self.mlp = _feed_forward(spec.mlp, hidden, where)
        parts = {"mixer": self.mixer, "mlp": self.mlp}
        for part in parts.values():
            if isinstance(part, SelfAttention | MLPLayer):
                part.input_is_normed = spec.norms != "post"
        for name in (name for name, part in parts.items() if part is not None):
            before = spec.norms != "post" and (name, spec.norms) != ("mlp", "parallel-shared")
            if before:
                self.add_module(f"norm_{name}", NormLayer(hidden, norm, **where))
            if spec.norms in {"post", "sandwich"}:
                self.add_module(f"norm_{name}_after", NormLayer(hidden, norm, **where))

    def forward(
        self, branch: Tensor, residual: Tensor | None, places: PositionInfo
    ) -> ResidualStream:
        """Carry the stream through the layer."""
        if FULL_RECOMPUTE not in self.recompute:
            return self._run(branch, residual, places)
        # Summed first: one tensor is kept for backward in place of two.
        total = branch if residual is None else branch + residual
        if self.norm_placement != "pre" or not isinstance(self.mlp, MLPLayer):
            found: ResidualStream = RecomputedFunction(self._run)(total, None, places)
            return found
        # Backward needs what the last product read, not what it gave: that one runs once.
        replay = RecomputedFunction(self._to_last)
        inner, total = replay(self.mlp, total, places)
        with drop_saved_tensors((inner, replay.recompute_output)):
            return self.mlp.project_down(inner, input_is_free=True), total

    def forward_selected_tokens(
        self, branch: Tensor, residual: Tensor | None, places: PositionInfo, wanted_W: Tensor
    ) -> ResidualStream:
        """Carry the stream of one sequence through the last layer, for some of its tokens alone.

        The mixer sees all; nobody reads what the feed-forward part would make of the others.
        """
        if (
            self.norm_placement in {"parallel", "parallel-shared"}
            or self.mlp is None
            or self.mixer is None
        ):
            return select_tokens(self._run(branch, residual, places), wanted_W)
        stream = select_tokens(self._part("mixer", branch, residual, places), wanted_W)
        return self._part("mlp", *stream, places)

    def _to_last(self, mlp: MLPLayer, total: Tensor, places: PositionInfo) -> tuple[Tensor, Tensor]:
        """Run the layer up to its last product; return what that reads, and the stream."""
        branch, residual = total, None
        if self.mixer is not None:
            branch, residual = self._part("mixer", total, None, places)
        norm: NormLayer = self.get_submodule("norm_mlp")  # type: ignore[assignment]
        normed, total = norm.add_and_norm(branch, residual)
        return mlp.activate(mlp.project_up(normed)), total

    def _run(self, branch: Tensor, residual: Tensor | None, places: PositionInfo) -> ResidualStream:
        if self.norm_placement in {"parallel", "parallel-shared"}:
            return self._parallel(branch, residual, places)
        for name in ("mixer", "mlp"):
            if getattr(self, name) is not None:
                branch, residual = self._part(name, branch, residual, places)
        return branch, residual

    def _part(
        self, name: str, branch: Tensor, residual: Tensor | None, places: PositionInfo
    ) -> tuple[Tensor, Tensor]:
        """Run one part after the other: norm, part, norm, as far as the layer has them."""
        if self.norm_placement == "post":
            total = branch if residual is None else branch + residual
            branch = self._call(name, total, None, places)
        else:
            norm: NormLayer = getattr(self, f"norm_{name}")
            normed, total = norm.add_and_norm(branch, residual)
            again = self._again(name, norm, total)
            branch = self._call(name, normed, again, places)
        if self.norm_placement != "pre":
            branch = getattr(self, f"norm_{name}_after")(branch)
        return branch, total

    def _parallel(
        self, branch: Tensor, residual: Tensor | None, places: PositionInfo
    ) -> ResidualStream:
        """Run both parts on the same stream and add what they give."""
        norm: NormLayer = self.get_submodule("norm_mixer")  # type: ignore[assignment]
        normed, total = norm.add_and_norm(branch, residual)
        again = self._again("mixer", norm, total)
        mixed = self._call("mixer", normed, again, places)
        if self.norm_placement == "parallel":
            norm = self.get_submodule("norm_mlp")  # type: ignore[assignment]
            normed, again = norm(total), self._again("mlp", norm, total)
        return mixed + self._call("mlp", normed, again, places), total

    def _again(self, name: str, norm: NormLayer, total: Tensor) -> Callable[[], Tensor] | None:
        """Return how backward makes the norm before a part anew, where it shall."""
        runs_whole = name == "mlp" and self.mlp_recompute_op in self.recompute
        if "layernorm" not in self.recompute and not runs_whole:
            return None
        kept = total.detach()
        return lambda: norm(kept)

    def _call(
        self, name: str, x_BTD: Tensor, again: Callable[[], Tensor] | None, places: PositionInfo
    ) -> Tensor:
        """Run the mixer or the feed-forward part; with `again`, what it reads is not kept."""
        part: Callable[..., Tensor] = getattr(self, name)
        if name == "mlp" and self.mlp_recompute_op == "moe" and "moe" in self.recompute:
            part = RecomputedFunction(part)
        inputs: tuple[Any, ...] = (x_BTD, places) if name == "mixer" else (x_BTD,)
        if again is None:
            return part(*inputs)
        with drop_saved_tensors((x_BTD, again)):
            return part(*inputs)


def _mixer(
    spec: token_mixers.Mixer | None,
    hidden: int,
    norm: block.NormSpec,
    alibi: bool,
    where: dict[str, Any],
) -> nn.Module | None:
    match spec:
        case token_mixers.AttentionSpec():
            return SelfAttention(spec, hidden, norm, alibi=alibi, **where)
        case token_mixers.LatentAttentionSpec():
            return MLASelfAttention(spec, hidden, norm, **where)
        case token_mixers.GatedDeltaNetSpec():
            return GatedDeltaNet(spec, hidden, norm, **where)
        case token_mixers.Mamba2Spec():
            return Mamba2Mixer(spec, hidden, norm, **where)
        case None:
            return None


def _feed_forward(
    spec: feedforward.FeedForward | None, hidden: int, where: dict[str, Any]
) -> nn.Module | None:
    match spec:
        case feedforward.MLPSpec():
            return MLPLayer(spec, hidden, **where)
        case feedforward.MoESpec():
            return MoELayer(spec, hidden, **where)
        case None:
            return None
