"""`Pipeline`: runs a step in the order that a schedule of `policy/pipeline` gives this rank.

The schedule is the value that the simulator times. Actions run one after the other, also those that
a schedule joins: a forward and a backward that DualPipe overlaps are issued in turn, and a device
runs them as it can. Transfers that stand side by side are begun together. Where the mesh has a
recorder, every pass goes into the run's timeline.
"""

from collections.abc import Sequence
from functools import lru_cache
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from meshwright.errors import Problem
from meshwright.policy.pipeline import batch_transfers, for_layout, with_transfers
from meshwright.policy.pipeline.schedule import TRANSFERS, Action, Schedule, groups
from meshwright.run.parallel.boundary import Boundary
from meshwright.run.parallel.passes import Passes
from meshwright.run.parallel.recorder import Recorder
from meshwright.run.parallel.spread import Spread
from meshwright.run.parallel.stage import Microbatch
from meshwright.spec.layout import Layout
from meshwright.spec.layout.stages import rank_chunks
from meshwright.spec.model import Model

if TYPE_CHECKING:
    from meshwright.run.parallel.runner import LastBackward

FORWARD = frozenset({"F", "send_forward", "recv_forward"})
"""All there is to do where nothing is trained."""


class Performed(NamedTuple):
    """Something a rank did, by the host's clock."""

    action: Action
    start_s: float
    """When all it needs was there; what it waited for lies before."""
    end_s: float


class Pipeline:
    """Runs microbatches through this rank's chunks and exchanges streams with other ranks."""

    def __init__(self, spread: Spread) -> None:
        self.spread = spread
        self.performed: list[Performed] = []
        """What the last step did, in order."""

    def __call__(
        self,
        microbatches: Sequence[Microbatch],
        share: float | Tensor,
        on_last: "LastBackward | None" = None,
    ) -> tuple[Tensor, Tensor]:
        """Run a step; return this rank's cross-entropy and what training adds, summed.

        Every rank of the pipeline is given the same microbatches.
        """
        return self._run(microbatches, share, on_last)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> tuple[Tensor, Tensor]:
        """Run forward alone, in the same order; the sums are those of the ranks with the head."""
        return self._run(microbatches, 1.0, None)

    def _run(
        self,
        microbatches: Sequence[Microbatch],
        share: float | Tensor,
        on_last: "LastBackward | None",
    ) -> tuple[Tensor, Tensor]:
        mesh, stage = self.spread.mesh, self.spread.stage
        layout = mesh.layout
        schedule = step_schedule(layout, len(microbatches))
        lane = schedule.actions[mesh.place.pp]
        if not torch.is_grad_enabled():
            lane = tuple(action for action in lane if action.op in FORWARD)
        sequence_ranks = layout.tp if layout.sequence_parallel else 1
        boundary = Boundary(
            mesh["pp"],
            schedule,
            [stage.boundary_shape(each, sequence_ranks) for each in microbatches],
            dtype=stage.dtype,
            device=mesh.device,
            overlap=layout.overlap_pp,
        )
        passes = Passes(stage, microbatches, share)
        last, recorder = completing(lane), mesh.recorder
        self.performed = []
        for group in groups(lane):
            if group[0].op in TRANSFERS:
                start = perf_counter()
                boundary.exchange(group)
                end = perf_counter()
                self.performed += [Performed(action, start, end) for action in group]
                continue
            for action in group:
                if on_last is not None and action in last:
                    on_last(action.chunk)
                self._compute(action, passes, boundary, recorder)
        boundary.finish()
        return passes.sums()

    def _compute(
        self, action: Action, passes: Passes, boundary: Boundary, recorder: Recorder | None
    ) -> None:
        op, chunk, microbatch, _ = action
        at, given = (chunk, microbatch), None
        if op == "F":
            if chunk > 0:
                given = boundary.take("forward", chunk, microbatch)
            start = perf_counter()
            found = passes.forward(at, given)
            if found is not None:
                boundary.put("forward", chunk + 1, microbatch, found)
        elif op == "W":
            start = perf_counter()
            passes.backward_weights(at)
        else:
            if chunk + 1 < boundary.schedule.chunks:
                given = boundary.take("backward", chunk, microbatch)
            start = perf_counter()
            found = passes.backward(at, given, weights=op == "B")
            if found is not None:
                boundary.put("backward", chunk - 1, microbatch, found)
        end = perf_counter()
        self.performed.append(Performed(action, start, end))
        if recorder is not None:
            recorder.passed(op, self.spread.stage.chunks[chunk], microbatch, end - start)


@lru_cache(maxsize=64)
def step_schedule(layout: Layout, microbatches: int) -> Schedule:
    """Return what all pipeline ranks do in a step, transfers included."""
    return batch_transfers(with_transfers(for_layout(layout, microbatches)))


def completing(lane: Sequence[Action]) -> frozenset[Action]:
    """Return for every chunk of a rank the action after which its gradients are complete."""
    last = {action.chunk: action for action in lane if action.op in ("B", "W")}
    return frozenset(last.values())


def problems(model: Model, layout: Layout) -> list[Problem]:
    """Say what keeps a pipeline from running."""
    found: list[Problem] = []
    if layout.pp == 1:
        return found
    for rank, held in enumerate(rank_chunks(layout, model.layers)):
        if not any(one.last > one.first or one.has_embedding or one.has_head for one in held):
            what = f"pipeline rank {rank} holds no layer of {model.layers}"
            found.append(Problem("layout.stage_layers", what, "give every rank a layer"))
    return found
