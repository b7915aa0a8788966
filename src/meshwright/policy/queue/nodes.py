"""`Nodes`: whole GPUs of nodes, given to gangs by a placement; nodes may fail or be drained."""

from collections.abc import Sequence

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.queue.ask import Standing
from meshwright.policy.queue.placing import PLACINGS, Parts, Placing
from meshwright.spec.names import unknown_name


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """A machine with GPUs of one kind."""

    gpus: int
    kind: str = ""
    """What its GPUs are; empty: that is not told, and they do for any job."""
    domain: str = ""
    """The rack or switch it hangs on: nodes of one domain are near each other."""
    cpus: float = float("inf")
    memory: float = float("inf")


class Nodes:
    """Nodes with what is free on each."""

    def __init__(
        self, nodes: Sequence[Node], placing: str = "consolidate", *, seed: int = 0
    ) -> None:
        """Begin with everything free; `placing` is one of `PLACINGS`."""
        if placing not in PLACINGS:
            raise InputError([unknown_name("placement", placing, list(PLACINGS), "placement")])
        if not nodes:
            raise InputError([Problem("nodes", "there are none", "give at least one")])
        self.nodes = tuple(nodes)
        self.placing = placing
        self.kinds = sorted({node.kind for node in nodes})
        count = len(nodes)
        self.free_gpus = [node.gpus for node in nodes]
        """Free on each node, whether or not it takes jobs."""
        self.free_cpus = [node.cpus for node in nodes]
        self.free_memory = [node.memory for node in nodes]
        self.takes = [True] * count
        """Whether a node takes new jobs."""
        self.works = [True] * count
        self.only: tuple[str, ...] = ()
        """Kinds of GPU that are given for the moment, whatever jobs ask for; empty: all."""
        self.shut_times = [0] * count
        self.total: float = sum(self.free_gpus)
        self.free: float = self.total
        self.largest_node = max(node.gpus for node in nodes)
        self.chooses: Placing = PLACINGS[placing](self, seed)

    def room(self, job: Standing, node: int, gpus: int) -> int:
        """Return how many of `gpus` a node has for a job, of its kind and with their cores."""
        if not self.takes[node]:
            return 0
        found, ask = min(gpus, self.free_gpus[node]), job.ask
        kinds = self.only or ask.kinds
        kind = self.nodes[node].kind
        if not found or (kinds and kind and kind not in kinds):
            return 0
        if ask.cpus:
            found = min(found, int(self.free_cpus[node] * ask.gpus / ask.cpus))
        if ask.memory:
            found = min(found, int(self.free_memory[node] * ask.gpus / ask.memory))
        return found

    def take(self, job: Standing, gpus: float | None = None) -> bool:
        """Give a job all it asks for, or `gpus`."""
        size = job.gpus if gpus is None else gpus
        if size > self.free:
            return False
        if size != int(size):
            what = f"it asks for {size:g} GPUs, and nodes give whole ones"
            raise InputError([Problem(f"job {job.ask.job}", what, "share GPUs, or round it up")])
        parts = self.chooses(job, int(size))
        if parts is None:
            return False
        job.place, job.held = parts, size
        self.again(job)
        return True

    def take_kind(self, job: Standing, kind: str) -> bool:
        """Give a job all it asks for, of one kind of GPU."""
        self.only = (kind,)
        try:
            return self.take(job)
        finally:
            self.only = ()

    def again(self, job: Standing) -> None:
        """Give a job the place it still has."""
        self._change(job, -1)

    def give(self, job: Standing) -> None:
        """Take back what a job has."""
        self._change(job, 1)
        job.place, job.held = None, 0.0

    def _change(self, job: Standing, sign: int) -> None:
        ask, parts = job.ask, job.place
        for node, gpus in parts:
            self.free_gpus[node] += sign * gpus
            if self.takes[node]:
                self.free += sign * gpus
            if ask.cpus:
                self.free_cpus[node] += sign * ask.cpus * gpus / ask.gpus
            if ask.memory:
                self.free_memory[node] += sign * ask.memory * gpus / ask.gpus

    def clear(self) -> None:
        """Take everything back."""
        self.free_gpus = [node.gpus for node in self.nodes]
        self.free_cpus = [node.cpus for node in self.nodes]
        self.free_memory = [node.memory for node in self.nodes]
        self.free = sum(
            gpus for gpus, takes in zip(self.free_gpus, self.takes, strict=True) if takes
        )

    def copy(self) -> "Nodes":
        """Return the same pool, to try things on."""
        other = object.__new__(Nodes)
        other.__dict__.update(self.__dict__)
        other.free_gpus, other.takes = list(self.free_gpus), list(self.takes)
        other.free_cpus, other.free_memory = list(self.free_cpus), list(self.free_memory)
        other.chooses = PLACINGS[self.placing](other, 0)
        return other

    def largest(self) -> float:
        """Return the most GPUs that are free on one node."""
        return max(
            (gpus for gpus, takes in zip(self.free_gpus, self.takes, strict=True) if takes),
            default=0,
        )

    def uses(self, job: Standing, node: int) -> bool:
        """Return whether a job runs on a node."""
        return any(one == node for one, _ in job.place)

    def speed(self, job: Standing) -> float:
        """Return how fast a job is where it runs: as fast as the slowest of its GPUs."""
        speeds = job.ask.speeds
        return min(speeds.get(self.nodes[node].kind, 1.0) for node, _ in job.place)

    def kind_of(self, place: Parts) -> str:
        """Return the kind of GPU of a place."""
        return self.nodes[place[0][0]].kind

    def down(self, node: int) -> None:
        """Take away a node on which nothing runs any more."""
        self._closed(node)
        self.works[node] = False
        self.total -= self.nodes[node].gpus

    def up(self, node: int) -> None:
        """Bring a node back."""
        self.works[node] = True
        self.total += self.nodes[node].gpus
        self._opened(node)

    def shut(self, node: int) -> None:
        """Let a node take no new jobs."""
        self.shut_times[node] += 1
        self._closed(node)

    def open(self, node: int) -> None:
        """Let a node take jobs again."""
        self.shut_times[node] -= 1
        self._opened(node)

    def _closed(self, node: int) -> None:
        if self.takes[node]:
            self.takes[node] = False
            self.free -= self.free_gpus[node]

    def _opened(self, node: int) -> None:
        if not self.takes[node] and self.works[node] and not self.shut_times[node]:
            self.takes[node] = True
            self.free += self.free_gpus[node]


def even_nodes(
    gpus: int, per_node: int, *, per_domain: int | None = None, kind: str = ""
) -> list[Node]:
    """Return nodes that are all alike, `per_domain` of them on a switch."""
    if gpus % per_node:
        what = f"{gpus} GPUs do not fill nodes of {per_node}"
        raise InputError([Problem("gpus", what, f"use {gpus - gpus % per_node or per_node}")])
    count = gpus // per_node
    near = per_domain or count
    return [Node(gpus=per_node, kind=kind, domain=str(at // near)) for at in range(count)]
