"""`Slices`: GPUs that jobs may share, in thousandths, on nodes of many kinds.

A job asks for a part of one GPU, for whole ones of one node, or for none and only cores. Where it
goes is decided by a score of each node that has room; the best wins, and of equals the first.
Scores are whole numbers up to 100, as those of Kubernetes' scheduler.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, Problem
from meshwright.policy.queue.ask import Ask, Standing
from meshwright.policy.queue.nodes import Node

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
WHOLE = 1000


class Shape(NamedTuple):
    """What a job wants of a node."""

    part: int
    """Thousandths of each GPU."""
    gpus: int
    """How many; none for jobs without."""
    cpus: float
    memory: float
    kinds: tuple[str, ...]

    @property
    def thousandths(self) -> int:
        """All it takes of GPUs."""
        return self.part * self.gpus


def shape_of(ask: Ask) -> Shape:
    """Return what an ask wants; parts are rounded to thousandths."""
    if ask.gpus < 1:
        part, count = round(ask.gpus * WHOLE), int(ask.gpus > 0)
    else:
        part, count = WHOLE, int(ask.gpus)
        if count != ask.gpus:
            what = f"it asks for {ask.gpus:g} GPUs: more than one have to be whole"
            raise InputError([Problem(f"job {ask.job}", what, "round it up")])
    return Shape(part, count, ask.cpus, ask.memory, ask.kinds)


class Scorer(ABC):
    """How good nodes are for a job, and which GPU of a node it gets."""

    def __init__(self, pool: "Slices") -> None:
        """Judge the nodes of a pool."""
        self.pool = pool

    @abstractmethod
    def scores(self, shape: Shape, nodes: Ints) -> Ints:
        """Return a score from 0 to 100 for each of the nodes, all of which have room."""

    def gpu(self, shape: Shape, node: int) -> int:
        """Return the GPU that a part is taken of: the one with least to spare."""
        left = self.pool.left[node]
        return int(np.argmin(np.where(left >= shape.part, left, WHOLE + 1)))


class Slices:
    """What is left of each GPU, and of cores and memory of each node."""

    def __init__(
        self,
        nodes: Sequence[Node],
        scorer: type[Scorer],
        *,
        seed: int = 0,
    ) -> None:
        """Begin with everything free."""
        if not nodes:
            raise InputError([Problem("nodes", "there are none", "give at least one")])
        self.nodes = tuple(nodes)
        self.kinds = sorted({node.kind for node in nodes})
        self.kind = np.array([self.kinds.index(node.kind) for node in nodes])
        self.gpus = np.array([node.gpus for node in nodes])
        self.left: Ints = np.zeros((len(nodes), int(self.gpus.max())), dtype=np.int64)
        """Thousandths left of each GPU; a node with fewer GPUs has nothing left of the rest."""
        self.cpus = np.zeros(len(nodes))
        self.memory = np.zeros(len(nodes))
        self.log: list[int] = []
        """Nodes in the order in which they changed."""
        self.guests: list[dict[int, int]] = []
        """How many jobs of which kind each node has: 0 parts of a GPU, else how many GPUs."""
        self.draw = random.Random(seed)
        self.total = float(self.gpus.sum())
        self.free = self.total
        self.allowed: dict[tuple[str, ...], Flags] = {}
        self.clear()
        self.scorer = scorer(self)

    def clear(self) -> None:
        """Take everything back."""
        for at, node in enumerate(self.nodes):
            self.left[at, : node.gpus] = WHOLE
            self.cpus[at], self.memory[at] = node.cpus, node.memory
        self.guests = [{} for _ in self.nodes]
        self.log.extend(range(len(self.nodes)))
        self.free = self.total

    def fitting(self, shape: Shape) -> Ints:
        """Return the nodes that have room for a job."""
        room = (self.cpus >= shape.cpus) & (self.memory >= shape.memory)
        if shape.gpus:
            room &= (self.left >= shape.part).sum(1) >= shape.gpus
            room &= self._of_kind(shape.kinds)
        return np.flatnonzero(room)

    def _of_kind(self, kinds: tuple[str, ...]) -> Flags:
        found = self.allowed.get(kinds)
        if found is None:
            found = self.allowed[kinds] = np.array(
                [not kinds or not node.kind or node.kind in kinds for node in self.nodes]
            )
        return found

    def take(self, job: Standing, gpus: float | None = None) -> bool:
        """Give a job all it asks for."""
        if gpus is not None and gpus != job.gpus:
            what = "jobs on shared GPUs keep their size"
            raise InputError([Problem(f"job {job.ask.job}", what, "use whole nodes")])
        shape = shape_of(job.ask)
        nodes = self.fitting(shape)
        if not len(nodes):
            return False
        node = int(nodes[np.argmax(self.scorer.scores(shape, nodes))])
        if shape.gpus == 0:
            parts: tuple[int, ...] = ()
        elif shape.part < WHOLE:
            parts = (self.scorer.gpu(shape, node),)
        else:
            parts = tuple(int(at) for at in np.flatnonzero(self.left[node] == WHOLE)[: shape.gpus])
        job.place, job.held = (node, shape.part, parts), job.gpus
        self.again(job)
        return True

    def again(self, job: Standing) -> None:
        """Give a job the place it still has."""
        self._change(job, -1)

    def give(self, job: Standing) -> None:
        """Take back what a job has."""
        self._change(job, 1)
        job.place, job.held = None, 0.0

    def _change(self, job: Standing, sign: int) -> None:
        node, part, gpus = job.place
        for gpu in gpus:
            self.left[node, gpu] += sign * part
        self.cpus[node] += sign * job.ask.cpus
        self.memory[node] += sign * job.ask.memory
        self.free += sign * part * len(gpus) / WHOLE
        if gpus:
            kind = len(gpus) if part == WHOLE else 0
            guests = self.guests[node]
            guests[kind] = guests.get(kind, 0) - sign
            if not guests[kind]:
                del guests[kind]
        self.log.append(node)

    def copy(self) -> "Slices":
        """Return the same pool, to try things on."""
        other = object.__new__(Slices)
        other.__dict__.update(self.__dict__)
        other.left, other.cpus, other.memory = (
            self.left.copy(),
            self.cpus.copy(),
            self.memory.copy(),
        )
        other.guests, other.log = [dict(one) for one in self.guests], []
        other.draw = random.Random(0)
        other.scorer = type(self.scorer)(other)
        return other

    def largest(self) -> float:
        """Return the most whole GPUs that are free on one node."""
        return float((self.left == WHOLE).sum(1).max())


def by_count(shapes: Iterable[Shape], coverage: float = 0.95) -> list[tuple[Shape, float]]:
    """Return the commonest shapes that make up `coverage` of all, with their shares of these."""
    counts: dict[Shape, int] = {}
    for shape in shapes:
        # Memory is left out: nodes have plenty of it, and it tells jobs apart for nothing.
        key = shape._replace(memory=0.0)
        counts[key] = counts.get(key, 0) + 1
    total, kept = sum(counts.values()), 0
    chosen: list[tuple[Shape, int]] = []
    # Between shapes that are equally common the larger comes first.
    order = sorted(
        counts.items(),
        key=lambda one: (one[1], one[0].cpus, one[0].part, one[0].gpus, "|".join(one[0].kinds)),
        reverse=True,
    )
    for shape, count in order:
        if kept >= coverage * total:
            break
        chosen.append((shape, count))
        kept += count
    return [(shape, count / kept) for shape, count in chosen]
