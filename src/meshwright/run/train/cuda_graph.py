"""Forward and backward of a microbatch as a CUDA graph: recorded once, replayed with new tokens.

A small model's kernels end sooner than the host can start the next ones; a replayed graph starts
them all at once. What it reads and writes never moves: tokens are copied in, losses copied out,
and gradients stay in memory of their own, which is what it costs. Microbatches that do not fit the
recording (documents, another shape) run as they would without one.

Nothing here knows what is recorded beyond the parameters whose gradients it leaves.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshwright.errors import InputError, Problem
from meshwright.run.nn.decoder import BatchLoss
from meshwright.run.train.data.batch import TrainBatch
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, flops_per_token

WARMUP_STEPS = 3
"""Microbatches that run before one is recorded: kernels are compiled and tables made in them."""

LAUNCH_S_PER_LAYER = 3e-3
"""What the host needs to start a layer's kernels, forward and backward (an H200's machine,
2026-11-15: 46 ms for 16 layers, 8 ms for 2)."""
DEVICE_FLOPS = 4e14
"""A rate that training reaches on Hopper, per second: 400 to 600 TFLOP/s were measured there."""

BackwardFn = Callable[[TrainBatch, float | Tensor], BatchLoss]
"""Runs a microbatch forward and backward, its loss multiplied by a share."""


class CudaGraphChoice(NamedTuple):
    """Whether steps are recorded, and why."""

    capture: bool
    reason: str


def select_cuda_graph(
    asked: bool | Literal["auto"],
    model: Model,
    layout: Layout,
    *,
    length: int,
    device: torch.device,
) -> CudaGraphChoice:
    """Say whether a run's steps shall be recorded; nothing is measured.

    Raises:
        InputError: it is asked for, and fp8 weights are kept between microbatches.
    """
    if asked is False:
        return CudaGraphChoice(False, "not asked for")
    if device.type != "cuda":
        return CudaGraphChoice(False, f"no CUDA graph on {device.type}")
    if layout.precision.startswith("fp8"):
        if asked is True:
            what = f"{layout.precision} keeps weights in fp8 between microbatches, as the host says"
            raise InputError([Problem("device.cuda_graph", what, 'use "auto" or false')])
        return CudaGraphChoice(False, f"{layout.precision} keeps weights between microbatches")
    tokens = layout.microbatch * length
    device_s = tokens * flops_per_token(model, length) / DEVICE_FLOPS
    host_s = model.layers * LAUNCH_S_PER_LAYER
    figures = f"a microbatch takes about {device_s * 1e3:.3g} ms, starting it {host_s * 1e3:.3g} ms"
    return CudaGraphChoice(asked is True or device_s < host_s, figures)


class CapturedMicrobatch(Protocol):
    """A microbatch that runs again with other tokens, its gradients always in the same memory."""

    gradients: list[Tensor | None]

    def __call__(self, part: TrainBatch, share: float) -> BatchLoss:
        """Run it; losses are the caller's to keep, gradients hold until the next run."""


class CudaGraphCapture:
    """One CUDA graph."""

    def __init__(
        self, backward: BackwardFn, parameters: Sequence[nn.Parameter], example: TrainBatch
    ) -> None:
        """Record; no parameter may hold a gradient, and none is left at it."""
        self._tokens_BT, self._labels_BT = example.tokens_BT.clone(), example.labels_BT.clone()
        positions = example.positions_BT
        self._positions_BT = None if positions is None else positions.clone()
        self._share = torch.ones((), device=self._tokens_BT.device)
        fixed = TrainBatch(
            example.step,
            self._tokens_BT,
            self._labels_BT,
            self._positions_BT,
            None,
            example.sequences,
        )
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may go on copying batches to the device meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            loss = backward(fixed, self._share)
        self._losses = tuple(
            each.detach() for each in (loss.loss_sum, loss.count, loss.auxiliary_loss)
        )
        self.gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None

    def __call__(self, part: TrainBatch, share: float) -> BatchLoss:
        """Run it; losses are the caller's to keep, gradients hold until the next run."""
        self._tokens_BT.copy_(part.tokens_BT, non_blocking=True)
        self._labels_BT.copy_(part.labels_BT, non_blocking=True)
        if self._positions_BT is not None and part.positions_BT is not None:
            self._positions_BT.copy_(part.positions_BT, non_blocking=True)
        self._share.fill_(share)
        self._graph.replay()
        return BatchLoss(*(each.clone() for each in self._losses))


CaptureFn = Callable[[BackwardFn, Sequence[nn.Parameter], TrainBatch], CapturedMicrobatch]


class GraphedForwardBackward:
    """Runs the microbatches of a step, from a recording as soon as there is one."""

    def __init__(
        self,
        backward: BackwardFn,
        parameters: Sequence[nn.Parameter],
        *,
        record: CaptureFn = CudaGraphCapture,
    ) -> None:
        self._backward, self._parameters, self._record = backward, parameters, record
        self._recorded: CapturedMicrobatch | None = None
        self._shape: tuple[object, ...] | None = None
        self._ran = 0
        self._totals: list[Tensor] = []

    def __call__(self, parts: Sequence[TrainBatch], share: float) -> list[BatchLoss]:
        """Run every microbatch; gradients of the sum of their losses are left at the parameters."""
        if self._recorded is None and self._fits(parts):
            if self._ran >= WARMUP_STEPS and all(each.grad is None for each in self._parameters):
                self._shape = _shape(parts[0])
                self._recorded = self._record(self._backward, self._parameters, parts[0])
            self._ran += len(parts)
        if self._recorded is None or not self._fits(parts):
            return [self._backward(part, share) for part in parts]
        return self._replay(self._recorded, parts, share)

    def _replay(
        self, recorded: CapturedMicrobatch, parts: Sequence[TrainBatch], share: float
    ) -> list[BatchLoss]:
        losses = [recorded(parts[0], share)]
        made = [each for each in recorded.gradients if each is not None]
        if len(parts) > 1:
            if not self._totals:
                self._totals = [torch.empty_like(each) for each in made]
            torch._foreach_copy_(self._totals, made)
            for part in parts[1:]:
                losses.append(recorded(part, share))
                torch._foreach_add_(self._totals, made)
            made = self._totals
        left = iter(made)
        for parameter, gradient in zip(self._parameters, recorded.gradients, strict=True):
            parameter.grad = None if gradient is None else next(left)
        return losses

    def _fits(self, parts: Sequence[TrainBatch]) -> bool:
        """Say whether all can run from one recording: the one there is, or a new one."""
        shape = self._shape or _shape(parts[0])
        return all(part.documents is None and _shape(part) == shape for part in parts)


def _shape(part: TrainBatch) -> tuple[object, ...]:
    return (part.tokens_BT.shape, part.positions_BT is None)
