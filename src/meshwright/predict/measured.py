"""`Measured`: what the parts of a training step take on one machine, in place of prices.

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
from meshwright.predict.block_comm import BlockComm, place
from meshwright.predict.block_time import Passes
from meshwright.predict.network import Op, collective_s
from meshwright.predict.run import Run


class Curve(msgspec.Struct, frozen=True):
    """Seconds by size: straight lines between measured points, the last one's slope beyond."""

    points: tuple[tuple[float, float], ...]
    """Bytes and seconds, from small to large."""

    def __post_init__(self) -> None:
        sizes = [size for size, _ in self.points]
        if not sizes or any(b <= a for a, b in pairwise(sizes)):
            what = "sizes of a curve do not grow" if sizes else "a curve has no points"
            raise InputError([Problem("points", what, "give sizes from small to large")])

    def seconds(self, size_bytes: float) -> float:
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


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One layer, the embedding or the head: seconds of a microbatch on one rank."""

    forward_s: float = 0.0
    """Compute of the forward pass."""
    backward_s: float = 0.0
    """Compute of a backward pass in one."""
    inputs_s: float = 0.0
    """Compute of the part of a split backward that others wait for."""
    weights_s: float = 0.0
    """Compute of its other part."""
    recompute_s: float = 0.0
    """What recompute adds to a backward."""
    comm: BlockComm = BlockComm()
    """Its collectives: all of them, as nothing hides where communication needs the same cores."""

    @property
    def passes(self) -> Passes:
        """Compute as cost functions have it."""
        return Passes(
            self.forward_s,
            self.backward_s - self.weights_s,
            self.weights_s,
            split=self.inputs_s + self.weights_s - self.backward_s,
        )

    @property
    def passes_with_comm(self) -> Passes:
        """The same with the collectives inside, for what has no place to say them apart."""
        forward, backward, comm = self.forward_s, self.backward_s, self.comm
        return self.passes._replace(
            forward=forward + comm.forward,
            input_gradient=backward - self.weights_s + comm.backward,
        )


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a machine takes for the parts of a step."""

    blocks: dict[str, Part]
    """One layer of every kind, by the name of its block."""
    embedding: Part = Part()
    head: Part = Part()
    message: Curve = Curve(((1.0, 0.0),))
    """A message from one pipeline rank to the next."""
    message_cpu: Curve = Curve(((1.0, 0.0),))
    """What one end of it takes from the rank's own compute."""
    collectives: dict[str, Curve] = {}
    """By operation and ranks (`all_reduce 2`); sizes are those of the whole, gathered tensor."""
    collect: Curve = Curve(((1.0, 0.0),))
    """Gradients laid side by side before they are exchanged."""
    parameter_s: float = 0.0
    """Norm and update of one parameter."""
    step_s: float = 0.0
    """What a step adds once: figures that all ranks share."""
    number_bytes: int = 4
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
        return curve.seconds(size_bytes)


def exchange_s(run: Run, axes: str, op: Op, size_bytes: float) -> float:
    """Return how long a collective among the ranks along some axes takes, measured or priced."""
    group = place(run.cluster, run.layout, axes)
    if run.measured is None:
        return collective_s(group, op, size_bytes)
    return run.measured.collective_s(op, group.ranks, size_bytes)
