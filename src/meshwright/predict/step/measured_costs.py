"""`MeasuredCosts`: what the parts of a training step take on one machine, in place of prices.

A prediction with it is that of the same simulator: passes, transfers and exchanges have measured
lengths, and the schedule, the buckets and who waits for whom are worked out as ever. It belongs to
one machine, one model and one shape of microbatches, and to no schedule. Who measures it is not
known here.
"""

from bisect import bisect_left
from itertools import pairwise
from operator import itemgetter

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.network import NcclOp, collective_s
from meshwright.predict.step.block_comm import BlockComm, build_group_placement
from meshwright.predict.step.block_time import PassTimes
from meshwright.predict.training_run.training_run import TrainingRun


class SizeCurve(msgspec.Struct, frozen=True):
    """Seconds by size: straight lines between measured points, the last one's slope beyond."""

    points: tuple[tuple[float, float], ...]
    """Bytes and seconds, from small to large."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or any(b <= a for a, b in pairwise(sizes)):
            what = "sizes of a curve do not grow" if sizes else "a curve has no points"
            raise InputError([Problem("points", what, "give sizes from small to large")])

    def predict_s(self, size_bytes: float) -> float:
        """Return how long so many bytes take; what is smaller than all points takes the least."""
        points = self.points
        if size_bytes <= points[0][0]:
            return points[0][1]
        if len(points) == 1:
            return points[0][1] * size_bytes / points[0][0]
        after = min(bisect_left(points, size_bytes, key=itemgetter(0)), len(points) - 1)
        low, high = points[after - 1], points[after]
        slope = max(0.0, (high[1] - low[1]) / (high[0] - low[0]))
        return low[1] + slope * (size_bytes - low[0])


class MeasuredLayer(msgspec.Struct, frozen=True, kw_only=True):
    """One layer, the embedding or the head: seconds of a microbatch on one rank."""

    forward_s: float = 0.0
    """Compute of the forward pass."""
    backward_s: float = 0.0
    """Compute of a backward pass in one."""
    dgrad_s: float = 0.0
    """Compute of the part of a split backward that others wait for."""
    wgrad_s: float = 0.0
    """Compute of its other part."""
    recompute_s: float = 0.0
    """What recompute adds to a backward."""
    comm: BlockComm = BlockComm()
    """Its collectives: all of them, as nothing hides where communication needs the same cores."""

    @property
    def pass_times(self) -> PassTimes:
        """Compute as cost functions have it."""
        return PassTimes(
            self.forward_s,
            self.backward_s - self.wgrad_s,
            self.wgrad_s,
            split_penalty_s=self.dgrad_s + self.wgrad_s - self.backward_s,
        )

    @property
    def pass_times_with_comm(self) -> PassTimes:
        """The same with the collectives inside, for what has no place to say them apart."""
        forward, backward, comm = self.forward_s, self.backward_s, self.comm
        return self.pass_times._replace(
            forward_s=forward + comm.forward_s,
            dgrad_s=backward - self.wgrad_s + comm.backward_s,
        )


class MeasuredCosts(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine takes for the parts of a step."""

    blocks: dict[str, MeasuredLayer]
    """One layer of every kind, by the name of its block."""
    embedding: MeasuredLayer = MeasuredLayer()
    head: MeasuredLayer = MeasuredLayer()
    stage_transfer: SizeCurve = SizeCurve(((1.0, 0.0),))
    """A message from one pipeline rank to the next."""
    stage_transfer_cpu: SizeCurve = SizeCurve(((1.0, 0.0),))
    """What one end of it takes from the rank's own compute."""
    collectives: dict[str, SizeCurve] = {}
    """By operation and ranks (`all_reduce 2`); sizes are those of the whole, gathered tensor."""
    bucket_copy: SizeCurve = SizeCurve(((1.0, 0.0),))
    """Gradients laid side by side before they are exchanged."""
    update_s_per_parameter: float = 0.0
    """Norm and update of one parameter."""
    fixed_step_s: float = 0.0
    """What a step adds once: figures that all ranks share."""
    element_bytes: int = 4
    """Of one number between stages, and of one weight."""
    shared_cores: int = 0
    """Cores that more ranks take turns on, dealt out one after another: passes are then what they
    need of a core. 0 where each rank has its own, and a pass has one length."""

    def collective_s(self, op: str, ranks: int, size_bytes: float) -> float:
        """Return how long a collective takes among so many ranks."""
        if ranks == 1:
            return 0.0
        curve = self.collectives.get(f"{op} {ranks}")
        if curve is None:
            what = f"{op} among {ranks} ranks was not measured"
            fix = f"measure it; there are {', '.join(sorted(self.collectives)) or 'none'}"
            raise InputError([Problem("measured.collectives", what, fix)])
        return curve.predict_s(size_bytes)


def collective_time_s(run: TrainingRun, axes: str, op: NcclOp, size_bytes: float) -> float:
    """Return how long a collective among the ranks along some axes takes, measured or priced."""
    group = build_group_placement(run.cluster, run.layout, axes)
    if run.measured is None:
        return collective_s(group, op, size_bytes)
    return run.measured.collective_s(op, group.ranks, size_bytes)
