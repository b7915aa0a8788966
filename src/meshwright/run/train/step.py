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

from meshwright.run.kernels.gradient_norm import GradientNorm, gradient_norm
from meshwright.run.kernels.products import Products
from meshwright.run.nn.build import DEFAULTS, Options, build
from meshwright.run.nn.decoder import Decoder, Loss
from meshwright.run.nn.fp8 import keep_fp8_weights, use_precision
from meshwright.run.nn.initialise import materialise
from meshwright.run.nn.linear import use_products
from meshwright.run.nn.recompute import use_recompute
from meshwright.run.train.data.batch import Batch
from meshwright.run.train.graph import GraphedBackward
from meshwright.run.train.learner import Learner, NextToken
from meshwright.run.train.optimizer.average import WeightAverage
from meshwright.run.train.optimizer.optimizer import Optimizer, StepReport
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model

WEIGHT_FORMATS = {"fp32": torch.float32, "fp16": torch.float16}
"""Formats of the weights that products read; every other precision keeps them in bfloat16."""


class Losses(NamedTuple):
    """What the tokens of one step cost, still on the device."""

    nats: Tensor
    """Cross-entropy of the trained tokens, or whatever else is minimised, summed."""
    auxiliary: Tensor
    """What training adds to it, summed."""
    tokens: int | Tensor
    """Trained tokens, over all replicas."""
    stop: Tensor | None = None
    """How many ranks were asked to stop; None where there is one."""
    dropped: Tensor | None = None
    """Choices of tokens that experts had no room for, and all; noughts without a limit."""
    over: int | Tensor | None = None
    """What the loss is a mean over, where that is not tokens: pairs of answers, say."""
    figures: Mapping[str, Tensor] = {}
    """What the learner saw of the step besides."""

    @property
    def divisor(self) -> int | Tensor:
        """What sums are divided by."""
        return self.tokens if self.over is None else self.over

    @property
    def mean(self) -> Tensor:
        """Mean loss: of a trained token in nats, mostly."""
        return self.nats / self.divisor


class StepFigures(NamedTuple):
    """What one step tells, still on the device."""

    losses: Losses
    update: StepReport
    """The gradient's norm, and whether it was used."""


def make_decoder(
    model: Model,
    layout: Layout,
    *,
    device: torch.device,
    seed: int = 0,
    products: Products | None = None,
    options: Options = DEFAULTS,
) -> Decoder:
    """Return a model with its first weights on a device, computing as a layout says."""
    decoder = build(model, dtype=weight_format(layout), options=options)
    materialise(decoder, device, seed)
    use_recompute(decoder.layers, layout)
    if products is not None:
        use_products(decoder, products)
    use_precision(decoder, layout.precision)
    return decoder


def weight_format(layout: Layout) -> torch.dtype:
    """Return the format of the weights that products read."""
    return WEIGHT_FORMATS.get(layout.precision, torch.bfloat16)


def dropped_choices(decoder: Decoder, device: torch.device) -> Tensor:
    """Return what `Experts.dropped` of all layers counted, which begins anew."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for part in decoder.experts():
        if part.dropped is not None:
            total += part.dropped
            part.dropped.zero_()
    return total


class TrainStep:
    """Runs the steps of a decoder and its optimizer, one batch at a time."""

    def __init__(
        self,
        decoder: Decoder,
        optimizer: Optimizer,
        *,
        microbatch: int,
        balance_rate: float = 0.0,
        graph: bool = False,
        learner: Learner | None = None,
    ) -> None:
        """Make the steps of a decoder.

        `balance_rate` moves the bias that balances experts without a loss, after each step;
        `graph` replays microbatches of one shape from a CUDA graph (see `choose_graph`). `learner`
        says what is minimised; None is the next token.
        """
        self.decoder, self.optimizer = decoder, optimizer
        self.learner: Learner = NextToken(decoder) if learner is None else learner
        self.microbatch, self.balance_rate = microbatch, balance_rate
        self._several: bool | None = None
        self._graphed: GraphedBackward | None = None
        if graph:
            trained = [each for each in decoder.parameters() if each.requires_grad]
            self._graphed = GraphedBackward(self._backward, trained)

    def __call__(self, batch: Batch, step: int) -> StepFigures:
        """Train on one batch, as step number `step`, counted from 0."""
        return self.update(self.gradients(batch), step)

    def gradients(self, batch: Batch) -> Losses:
        """Run every microbatch forward and backward; gradients of their mean loss are left."""
        self.learner.begin(batch)
        count = max(1, self.learner.count(batch))
        parts = batch.split(self.microbatch)
        if self._several != (len(parts) > 1):
            self._several = len(parts) > 1
            keep_fp8_weights(self.decoder, self._several)
        if self._graphed is not None:
            losses = self._graphed(parts, 1 / count)
        else:
            losses = [self._backward(part, 1 / count) for part in parts]
        return Losses(
            _sum([loss.nats_sum.detach() for loss in losses]),
            _sum([loss.auxiliary.detach() for loss in losses]),
            max(1, batch.targets),
            dropped=dropped_choices(self.decoder, losses[0].nats_sum.device),
            over=count,
            figures=self.learner.figures(),
        )

    def norm(self) -> GradientNorm:
        """Return the norm of the gradients that are there, before loss scaling is undone."""
        return gradient_norm(self.optimizer.gradients().values())

    def update(self, losses: Losses, step: int) -> StepFigures:
        """Update the weights by the gradients that are there, and drop them."""
        with record_function("optimizer"):
            report = self.optimizer.step(self.optimizer.learning_rate(step))
            self.optimizer.zero_grad()
            if self.balance_rate:
                # Where nothing is updated, what was counted may come from scores of NaN.
                self._balance(self.balance_rate * ~report.skipped)
        return StepFigures(losses, report)

    replica: tuple[int, int] = (0, 1)
    """Which of how many replicas this is: the only one."""

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Return the summed loss of a batch: its cross-entropy in nats, mostly."""
        self.learner.begin(batch)
        return self.learner.loss(batch).nats_sum

    def unsee(self) -> None:
        """Let what was evaluated last count for nothing."""
        self.learner.unsee()

    def count(self, batch: Batch) -> int:
        """Return what that is divided by."""
        return self.learner.count(batch)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Let nothing be left out by chance, and nothing be counted as trained."""
        was_training = self.decoder.training
        self.learner.train(False)
        try:
            yield
        finally:
            self.learner.train(was_training)

    @staticmethod
    def total(nats: Tensor, tokens: int) -> Tensor:
        """Return what was evaluated here, which is all: nats and tokens."""
        return torch.stack([nats.double(), torch.full_like(nats, tokens, dtype=torch.float64)])

    @contextmanager
    def averaged(self, average: WeightAverage) -> Iterator[None]:
        """Let the averaged weights stand in for the decoder's own."""
        with average.in_place_of(dict(self.decoder.named_parameters())):
            yield

    def drop(self) -> None:
        """Drop the gradients of a step that shall not happen, and what it counted."""
        self.optimizer.zero_grad()
        self._balance(0.0)

    def _balance(self, rate: float | Tensor) -> None:
        for part in self.decoder.experts():
            part.update_balance(rate)

    def _backward(self, part: Batch, share: float | Tensor) -> Loss:
        with record_function("forward"):
            loss = self.learner.loss(part)
            mean = loss.total * share
            if self.optimizer.loss_scale is not None:
                mean = mean * self.optimizer.loss_scale.scale
        with record_function("backward"):
            mean.backward()  # type: ignore[no-untyped-call]
        return loss


def _sum(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()
