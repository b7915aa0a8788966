"""`SpreadStep`: one training step of a model that several ranks hold together.

It has the interface of `TrainStep`. All ranks call it with the same sequences, but for those of
other data-parallel replicas; losses, norms and the wish to stop come out the same on every rank.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.profiler import record_function

from meshwright.run.kernels.gradient_norm import GradientNorm
from meshwright.run.kernels.products import Products
from meshwright.run.nn.build import DEFAULTS, Options
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.fp8 import keep_fp8_weights, use_precision
from meshwright.run.nn.linear import use_products
from meshwright.run.parallel.context import traders
from meshwright.run.parallel.experts import sum_loads
from meshwright.run.parallel.group import Group
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.order_check import OrderCheck
from meshwright.run.parallel.recorder import span_of
from meshwright.run.parallel.runner import Runner, Sums
from meshwright.run.parallel.spread import Spread, spread
from meshwright.run.parallel.stage import Microbatch
from meshwright.run.parallel.sync import Sync
from meshwright.run.train.data.batch import Batch
from meshwright.run.train.learner import Learner, NextToken
from meshwright.run.train.optimizer.average import WeightAverage
from meshwright.run.train.optimizer.optimizer import Optimizer
from meshwright.run.train.step import Losses, StepFigures, dropped_choices, weight_format
from meshwright.spec.model import Experts, Model


def make_spread(
    model: Model,
    mesh: Mesh,
    *,
    seed: int = 0,
    products: Products | None = None,
    options: Options = DEFAULTS,
) -> Spread:
    """Return this rank's part of a model with its first weights, computing as the layout says."""
    layout = mesh.layout
    made = spread(model, mesh, dtype=weight_format(layout), seed=seed, options=options)
    if products is not None:
        use_products(made.decoder, products)
    use_precision(made.decoder, layout.precision)
    return made


class SpreadStep:
    """Runs the steps of this rank's part of a model."""

    def __init__(
        self,
        spread: Spread,
        sync: Sync,
        optimizer: Optimizer,
        *,
        microbatch: int,
        balance_rate: float = 0.0,
        learner: Learner | None = None,
    ) -> None:
        """Make the steps; the optimizer has been given `sync.named_parameters()`.

        Every rank does so at the same point: groups that the steps will use are connected.
        `learner` says what is minimised; None is the next token.
        """
        self.spread, self.sync, self.optimizer = spread, sync, optimizer
        self.learner: Learner = NextToken(spread.decoder) if learner is None else learner
        self.microbatch, self.balance_rate = microbatch, balance_rate
        self.runner, self._same_order = Runner(spread), OrderCheck(spread.mesh)
        self.wants_stop = False
        """This rank was asked to stop; the next step tells the others."""
        self._gradients: dict[str, Tensor] = {}
        self._began_ns = 0
        spread.mesh.warm((*groups_of_passes(spread), *sync.groups()))

    def __call__(self, batch: Batch, step: int) -> StepFigures:
        """Train on one batch, as step number `step`, counted from 0."""
        return self.update(self.gradients(batch), step)

    def gradients(self, batch: Batch) -> Losses:
        """Run every microbatch forward and backward; the gradients of all ranks are added up."""
        mesh = self.spread.mesh
        recorder = mesh.recorder
        self._began_ns = 0 if recorder is None else time.time_ns()
        self.learner.begin(batch)
        # Of replicas alone: others of a replica have the same sequences. Made on the device, as a
        # copy from the host would wait for all that the device still has to do.
        counts = torch.full((2,), float(batch.targets), dtype=torch.float64, device=mesh.device)
        counts[:1].fill_(self.learner.count(batch))
        over, tokens = mesh["dp"].all_reduce(counts).clamp(min=1)
        share = (1 / over).float()
        if self.optimizer.loss_scale is not None:
            share = share * self.optimizer.loss_scale.scale
        parts = [microbatch_of(part) for part in batch.split(self.microbatch)]
        # What ZeRO 3 lets go of must not stay as a copy.
        keep_fp8_weights(self.spread.decoder, len(parts) > 1 and mesh.layout.zero < 3)
        self.sync.begin()
        sums = self.runner(parts, share, self.sync.last)
        with record_function("gradients"), span_of(recorder, "gradients"):
            self._gradients = self.sync.gradients()
        total = self._total(sums, stop=self.wants_stop)
        seen = self.learner.figures()
        return Losses(total[0], total[1], tokens, total[2], total[3:], over=over, figures=seen)

    def _total(self, sums: Sums, *, stop: bool = False) -> Tensor:
        """Add up the ranks' losses, who wants to stop, and what experts had no room for."""
        mesh = self.spread.mesh
        wishes = torch.full((), float(stop), dtype=torch.float64, device=mesh.device)
        mine = torch.stack([sums.nats.double(), sums.auxiliary.double(), wishes])
        # Ranks that share the work on the same tokens have the same loss.
        mine[:2] /= mesh.layout.tp
        return mesh.world.all_reduce(torch.cat([mine, dropped_choices(self.decoder, mesh.device)]))

    def norm(self) -> GradientNorm:
        """Return the norm of all gradients, before loss scaling is undone."""
        return self.sync.norm()

    def update(self, losses: Losses, step: int) -> StepFigures:
        """Update the weights by the gradients that are there, and drop them."""
        with record_function("optimizer"), span_of(self.spread.mesh.recorder, "optimizer"):
            report = self.optimizer.step(
                self.optimizer.learning_rate(step), norm=self.norm(), gradients=self._gradients
            )
            self._gradients = {}
            self.sync.finish()
            if self.balance_rate:
                self._balance(self.balance_rate * ~report.skipped)
        self._same_order()
        self._record(f"step {step + 1}")
        return StepFigures(losses, report)

    def _record(self, name: str) -> None:
        """Write the step that ends here into the timeline, where there is one."""
        recorder = self.spread.mesh.recorder
        if recorder is not None and self._began_ns:
            recorder.step(name, self._began_ns)

    def drop(self) -> None:
        """Drop the gradients of a step that shall not happen, and what it counted."""
        self._gradients = {}
        self.sync.finish()
        self._balance(0.0)
        self._record("step left out")

    def _balance(self, rate: float | Tensor) -> None:
        """Move the bias of experts by the load over all ranks that share a step's tokens."""
        sum_loads(self.spread.decoder, self.spread.mesh)
        for part in self.spread.decoder.experts():
            part.update_balance(rate)

    @property
    def decoder(self) -> Decoder:
        """This rank's part of the model."""
        return self.spread.decoder

    @contextmanager
    def averaged(self, average: WeightAverage) -> Iterator[None]:
        """Let the averaged weights stand in for the model's own, on every rank."""
        try:
            with average.in_place_of(dict(self.sync.named_parameters())):
                self.sync.finish()
                yield
        finally:
            self.sync.finish()

    @property
    def replica(self) -> tuple[int, int]:
        """Which of how many data-parallel replicas this rank belongs to."""
        return self.spread.mesh.place.dp, self.spread.mesh.layout.dp

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Return this rank's share of the summed cross-entropy of its replica's batch, in nats."""
        self.learner.begin(batch)
        nats = self.runner.evaluate(microbatch_of(batch)).nats.double()
        # Ranks that share the work on the same tokens have the same loss.
        return nats / self.spread.mesh.layout.tp

    def unsee(self) -> None:
        """Let what was evaluated last count for nothing."""
        self.learner.unsee()

    def count(self, batch: Batch) -> int:
        """Return what the loss of a batch is divided by."""
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

    def total(self, nats: Tensor, tokens: int) -> Tensor:
        """Return what was evaluated on all ranks: nats and tokens, which each replica counts."""
        mesh = self.spread.mesh
        first = mesh.place.tp == mesh.place.cp == mesh.place.pp == 0
        counted = torch.full_like(nats, tokens if first else 0)
        return mesh.world.all_reduce(torch.stack([nats, counted]))


def groups_of_passes(spread: Spread) -> list[Group]:
    """Return everybody that a rank exchanges with in and around its passes."""
    mesh, layout = spread.mesh, spread.mesh.layout
    found = [mesh[axes] for axes in ("tp", "dp", "pp", "cp")]
    trade = traders(layout)
    if 1 < trade < layout.cp:
        found[-1:] = [mesh.neighbours("cp", trade), mesh.counterparts("cp", trade)]
    if any(isinstance(block.mlp, Experts) for block in spread.decoder.model.blocks):
        found += [mesh[axes] for axes in ("ep", "expert_tp", "expert_tp-ep", "tp-cp-dp")]
    return found


def microbatch_of(batch: Batch) -> Microbatch:
    """Return what the passes need of a batch."""
    given = (batch.tokens_BT, batch.labels_BT, batch.positions_BT, batch.documents)
    return Microbatch(*given, source=batch)
