"""`Passes`: the forward and backward passes of a step through the chunks of one pipeline rank.

A chunk reads a leaf of its own graph, so a microbatch has one graph per chunk; backward begins at
the chunk's end with the gradient that came from the next one, and leaves the leaf's for the one
before. Of a chunk's output nothing is kept but where backward begins.

The balancing loss of routed experts is differentiated in the chunk that has them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwright.run.kernels.deferred import Late, set_aside
from meshwright.run.nn.decoder import Loss
from meshwright.run.parallel.stage import Microbatch, Stage

Key = tuple[int, int]
"""A chunk and a microbatch."""


class _Kept(NamedTuple):
    """What a microbatch leaves in a chunk between its forward and its backward pass."""

    x: Tensor | None
    """The leaf it read; the first chunk has none."""
    end: GradientEdge | None
    """Where backward begins with the gradient of the next chunk."""
    loss: GradientEdge | None
    """Where it begins with the share of this step's loss."""


class Passes:
    """Runs microbatches through chunks; gradients are left at the parameters."""

    def __init__(
        self, stage: Stage, microbatches: Sequence[Microbatch], share: float | Tensor
    ) -> None:
        """`share` multiplies every loss before it is differentiated."""
        self.stage, self.microbatches = stage, microbatches
        device = microbatches[0].tokens_BT.device
        self._share = torch.as_tensor(share, dtype=torch.float32, device=device)
        self._kept: dict[Key, _Kept] = {}
        self._late: dict[Key, Late] = {}
        self._nats: list[Tensor] = []
        self._auxiliary: list[Tensor] = []

    def forward(self, at: Key, x_BTD: Tensor | None) -> Tensor | None:
        """Return what the next chunk reads of a microbatch; nothing behind the last."""
        chunk, number = at
        if x_BTD is not None and torch.is_grad_enabled():
            x_BTD.requires_grad_()
        microbatch = self.microbatches[number]
        found = self.stage.forward(chunk, microbatch, x_BTD)
        if isinstance(found, Loss):
            self._nats.append(found.nats_sum.detach())
            self._auxiliary.append(found.auxiliary.detach())
            self._keep(_Kept(x_BTD, None, _edge(found.total)), at)
            return None
        balance = self.stage.balance_loss(chunk, microbatch)
        if balance is not None:
            self._auxiliary.append(balance.detach())
        self._keep(_Kept(x_BTD, _edge(found), None if balance is None else _edge(balance)), at)
        return found.detach()

    def _keep(self, kept: _Kept, at: Key) -> None:
        if torch.is_grad_enabled():
            self._kept[at] = kept

    def backward(self, at: Key, slope_BTD: Tensor | None, *, weights: bool = True) -> Tensor | None:
        """Return the gradient of what the chunk read, for the one before; none of the first.

        `slope_BTD` is that of its output. Without `weights` their gradients wait for
        `backward_weights`.
        """
        x, end, loss = self._kept.pop(at)
        begins = []
        if end is not None:
            assert slope_BTD is not None, "only the last chunk has a loss of its own"
            begins.append((end, slope_BTD))
        if loss is not None:
            begins.append((loss, self._share))
        if begins:
            edges, slopes = zip(*begins, strict=True)
            if weights:
                torch.autograd.backward(edges, slopes)
            else:
                with set_aside() as self._late[at]:
                    torch.autograd.backward(edges, slopes)
        elif not weights:
            self._late[at] = Late()
        if x is None:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    def backward_weights(self, at: Key) -> None:
        """Add the weights' gradients that wait since a microbatch's backward pass."""
        self._late.pop(at).finish()

    def sums(self) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy and what training adds to it, over all microbatches."""
        return self._sum(self._nats), self._sum(self._auxiliary)

    def _sum(self, losses: list[Tensor]) -> Tensor:
        if not losses:
            return torch.zeros((), device=self._share.device)
        return torch.stack(losses).sum()


def _edge(tensor: Tensor) -> GradientEdge | None:
    """Return where backward begins at a tensor; nowhere where it depends on nothing trained."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None
