"""One training step: forward and backward of each microbatch, clipping, the update.

Nothing here waits for the device: losses and norms stay tensors, and a step whose gradients are
not finite leaves the weights alone on the device itself. A loss is divided by the number of tokens
that are trained in the whole step, so microbatches of unequal padding weigh as one batch would.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from meshwright.run.kernels.optimizer.grad_norm import GradNorm, compute_grad_norm
from meshwright.run.nn.decoder import BatchLoss, Decoder
from meshwright.run.nn.linear.fp8_conversion import cache_fp8_weights
from meshwright.run.train.cuda_graph import GraphedForwardBackward
from meshwright.run.train.data.batch import TrainBatch
from meshwright.run.train.objective import NextTokenObjective, Objective
from meshwright.run.train.optimizer.ema import WeightEMA
from meshwright.run.train.optimizer.optimizer import Optimizer, OptimizerStepReport
from meshwright.spec.layout import Layout

WEIGHT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16}
"""Formats of the weights that products read; every other precision keeps them in bfloat16."""


class StepLosses(NamedTuple):
    """What the tokens of one step cost, still on the device."""

    loss_sum: Tensor
    """Cross-entropy of the trained tokens, or whatever else is minimised, summed."""
    auxiliary_loss: Tensor
    """What training adds to it, summed."""
    tokens: int | Tensor
    """Trained tokens, over all replicas."""
    stop_requests: Tensor | None = None
    """How many ranks were asked to stop; None where there is one."""
    dropped_counts: Tensor | None = None
    """Choices of tokens that experts had no room for, and all; noughts without a limit."""
    divisor_override: int | Tensor | None = None
    """What the loss is a mean over, where that is not tokens: pairs of answers, say."""
    metrics: Mapping[str, Tensor] = {}
    """What the learner saw of the step besides."""

    @property
    def divisor(self) -> int | Tensor:
        """What sums are divided by."""
        return self.tokens if self.divisor_override is None else self.divisor_override

    @property
    def mean_loss(self) -> Tensor:
        """Mean loss: of a trained token in nats, mostly."""
        return self.loss_sum / self.divisor


class StepMetrics(NamedTuple):
    """What one step tells, still on the device."""

    losses: StepLosses
    optimizer_report: OptimizerStepReport
    """The gradient's norm, and whether it was used."""


def get_weight_dtype(layout: Layout) -> torch.dtype:
    """Return the format of the weights that products read."""
    return WEIGHT_DTYPES.get(layout.precision, torch.bfloat16)


def pop_dropped_counts(decoder: Decoder, device: torch.device) -> Tensor:
    """Return the sum of all layers' `dropped_counts`, and reset them."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for part in decoder.iter_moe_layers():
        if part.dropped_counts is not None:
            total += part.dropped_counts
            part.dropped_counts.zero_()
    return total


class TrainStep:
    """Runs the steps of a decoder and its optimizer, one batch at a time."""

    def __init__(
        self,
        decoder: Decoder,
        optimizer: Optimizer,
        *,
        microbatch: int,
        expert_bias_update_rate: float = 0.0,
        graph: bool = False,
        objective: Objective | None = None,
    ) -> None:
        """Make the steps of a decoder.

        `expert_bias_update_rate` moves the bias that balances experts without a loss, after each
        step; `graph` replays microbatches of one shape from a CUDA graph (see `select_cuda_graph`).
        `objective` says what is minimized; None is the next token.
        """
        self.decoder, self.optimizer = decoder, optimizer
        self.objective: Objective = NextTokenObjective(decoder) if objective is None else objective
        self.microbatch, self.expert_bias_update_rate = microbatch, expert_bias_update_rate
        self._several: bool | None = None
        self._graphed: GraphedForwardBackward | None = None
        if graph:
            trained = [each for each in decoder.parameters() if each.requires_grad]
            self._graphed = GraphedForwardBackward(self._backward, trained)

    def __call__(self, batch: TrainBatch, step: int) -> StepMetrics:
        """Train on one batch, as step number `step`, counted from 0."""
        return self.update(self.forward_backward(batch), step)

    def forward_backward(self, batch: TrainBatch) -> StepLosses:
        """Run every microbatch forward and backward; gradients of their mean loss are left."""
        self.objective.begin_step(batch)
        count = max(1, self.objective.loss_divisor(batch))
        parts = batch.split_microbatches(self.microbatch)
        if self._several != (len(parts) > 1):
            self._several = len(parts) > 1
            cache_fp8_weights(self.decoder, self._several)
        if self._graphed is not None:
            losses = self._graphed(parts, 1 / count)
        else:
            losses = [self._backward(part, 1 / count) for part in parts]
        return StepLosses(
            _sum([loss.loss_sum.detach() for loss in losses]),
            _sum([loss.auxiliary_loss.detach() for loss in losses]),
            max(1, batch.num_targets),
            dropped_counts=pop_dropped_counts(self.decoder, losses[0].loss_sum.device),
            divisor_override=count,
            metrics=self.objective.pop_metrics(),
        )

    def grad_norm(self) -> GradNorm:
        """Return the norm of the gradients that are there, before loss scaling is undone."""
        return compute_grad_norm(self.optimizer.gradients().values())

    def update(self, losses: StepLosses, step: int) -> StepMetrics:
        """Update the weights by the gradients that are there, and drop them."""
        with record_function("optimizer"):
            report = self.optimizer.step(self.optimizer.learning_rate(step))
            self.optimizer.zero_grad()
            if self.expert_bias_update_rate:
                # Where nothing is updated, what was counted may come from scores of NaN.
                self._balance(self.expert_bias_update_rate * ~report.is_skipped)
        return StepMetrics(losses, report)

    replica: tuple[int, int] = (0, 1)
    """Which of how many replicas this is: the only one."""

    @torch.no_grad()
    def evaluate(self, batch: TrainBatch) -> Tensor:
        """Return the summed loss of a batch: its cross-entropy in nats, mostly."""
        self.objective.begin_step(batch)
        return self.objective.loss(batch).loss_sum

    def discard_eval_stats(self) -> None:
        """Discard the last evaluation's statistics."""
        self.objective.discard_metrics()

    def loss_divisor(self, batch: TrainBatch) -> int:
        """Return what that is divided by."""
        return self.objective.loss_divisor(batch)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Let nothing be left out by chance, and nothing be counted as trained."""
        was_training = self.decoder.training
        self.objective.train(False)
        try:
            yield
        finally:
            self.objective.train(was_training)

    @staticmethod
    def reduce_eval(nats: Tensor, tokens: int) -> Tensor:
        """Return what was evaluated here, which is all: nats and tokens."""
        return torch.stack([nats.double(), torch.full_like(nats, tokens, dtype=torch.float64)])

    @contextmanager
    def with_ema_weights(self, average: WeightEMA) -> Iterator[None]:
        """Let the averaged weights stand in for the decoder's own."""
        with average.swap_into(dict(self.decoder.named_parameters())):
            yield

    def discard(self) -> None:
        """Drop the gradients of a step that shall not happen, and what it counted."""
        self.optimizer.zero_grad()
        self._balance(0.0)

    def _balance(self, rate: float | Tensor) -> None:
        for part in self.decoder.iter_moe_layers():
            part.update_expert_bias(rate)

    def _backward(self, part: TrainBatch, share: float | Tensor) -> BatchLoss:
        with record_function("forward"):
            loss = self.objective.loss(part)
            mean = loss.total * share
            if self.optimizer.grad_scaler is not None:
                mean = mean * self.optimizer.grad_scaler.scale
        with record_function("backward"):
            mean.backward()  # type: ignore[no-untyped-call]
        return loss


def _sum(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
