"""`ReplicaStep`: one training step of replicas that each hold a whole model.

Whatever a learner minimises, losses, counts and gradients are sums, so replicas add theirs up and
come to the same update. Gradients travel together, once backward is done.
"""

import time
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.profiler import record_function

from meshwright.run.nn.decoder import Decoder
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.recorder import span_of
from meshwright.run.train.data.batch import Batch
from meshwright.run.train.learner import Learner
from meshwright.run.train.optimizer.optimizer import Optimizer
from meshwright.run.train.step import Losses, StepFigures, TrainStep, dropped_choices

BUCKET_BYTES = 1 << 28
"""Gradients that travel together: enough for a link, and little beside them."""


class ReplicaStep(TrainStep):
    """Runs the steps of one replica among others."""

    def __init__(
        self,
        decoder: Decoder,
        optimizer: Optimizer,
        mesh: Mesh,
        learner: Learner,
        *,
        microbatch: int,
    ) -> None:
        """Make the steps; every replica does so at the same point."""
        super().__init__(decoder, optimizer, microbatch=microbatch, learner=learner)
        self.mesh, self.wants_stop = mesh, False
        self.replica = (mesh.place.dp, mesh.layout.dp)
        self._began_ns = 0
        mesh.warm((mesh["dp"], mesh.world))

    def gradients(self, batch: Batch) -> Losses:
        """Run every microbatch forward and backward; the gradients of all replicas are added up."""
        mesh = self.mesh
        self._began_ns = 0 if mesh.recorder is None else time.time_ns()
        self.learner.begin(batch)
        # Replicas have different numbers of tokens, pairs or answers.
        mine = [self.learner.count(batch), batch.targets]
        counts = torch.tensor(mine, dtype=torch.float64, device=mesh.device)
        counts = mesh["dp"].all_reduce(counts).clamp(min=1)
        share = (1 / counts[0]).float()
        losses = [self._backward(part, share) for part in batch.split(self.microbatch)]
        with record_function("gradients"), span_of(mesh.recorder, "gradients"):
            self._add_up(self.optimizer.gradients().values())
        stop = torch.full((), float(self.wants_stop), dtype=torch.float64, device=mesh.device)
        sums = [torch.stack([getattr(one, name).detach() for one in losses]).sum().double()
                for name in ("nats_sum", "auxiliary")]  # fmt: skip
        dropped = dropped_choices(self.decoder, mesh.device)
        total = mesh["dp"].all_reduce(torch.cat([torch.stack([*sums, stop]), dropped]))
        return Losses(
            total[0],
            total[1],
            counts[1],
            total[2],
            total[3:],
            over=counts[0],
            figures=self.learner.figures(),
        )

    def _add_up(self, gradients: Iterable[Tensor]) -> None:
        """Add the gradients of all replicas, some at a time."""
        alike: dict[torch.dtype, list[Tensor]] = {}
        for one in gradients:
            alike.setdefault(one.dtype, []).append(one)
        for group in alike.values():
            for some in _filled(group):
                flat = self.mesh["dp"].all_reduce(torch.cat([one.flatten() for one in some]))
                sizes = [one.numel() for one in some]
                for one, added in zip(some, torch.split(flat, sizes), strict=True):
                    one.copy_(added.view_as(one))

    def update(self, losses: Losses, step: int) -> StepFigures:
        """Update the weights as every replica does."""
        with span_of(self.mesh.recorder, "optimizer"):
            found = super().update(losses, step)
        self._record(f"step {step + 1}")
        return found

    def drop(self) -> None:
        """Drop the gradients of a step that shall not happen."""
        super().drop()
        self._record("step left out")

    def _record(self, name: str) -> None:
        if self.mesh.recorder is not None and self._began_ns:
            self.mesh.recorder.step(name, self._began_ns)

    def total(self, nats: Tensor, tokens: int) -> Tensor:  # type: ignore[override]
        """Return what all replicas evaluated: nats, and what they are divided by."""
        return self.mesh["dp"].all_reduce(TrainStep.total(nats, tokens))


def _filled(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    some, held = list[Tensor](), 0
    for one in tensors:
        if some and held + one.nbytes > BUCKET_BYTES:
            yield some
            some, held = [], 0
        some.append(one)
        held += one.nbytes
    if some:
        yield some
