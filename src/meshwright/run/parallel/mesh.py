"""`Mesh`: the place of one rank in a layout, and the groups it talks to.

Which rank sits where is `spec.layout.ranks`' to say; here torch's process groups are made of it.
Groups of the same ranks share one of torch's, except the pipeline's, whose messages must not wait
behind collectives. All that a layout may need are made at once, in the same order on every rank:
torch names a group by how many its process has, and one that formed in the middle of a pass would
hold up whoever is not there yet.
"""

from collections.abc import Iterable, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.algorithm_selection import (
    AlgorithmsByGroup,
    SelectedAlgorithms,
    find_algorithm_problems,
)
from meshwright.run.parallel.collective.communicator import RankCommunicator
from meshwright.run.parallel.flight_recorder import FlightRecorder
from meshwright.run.parallel.group_coordinator import GroupCoordinator
from meshwright.run.parallel.timeline_recorder import TimelineRecorder
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import get_coordinate, get_expert_coordinate, get_process_group

AXES = (
    "tp",
    "cp",
    "dp",
    "pp",
    "dp-cp",
    "tp-cp",
    "tp-pp",
    "tp-cp-dp",
    "tp-cp-dp-pp",
    "embedding",
    "shard",
    "replicate",
)
"""Groups of the dense part; `spec.layout.ranks.groups` says what they are."""
EXPERT_AXES = ("ep", "expert_tp", "expert_dp", "expert_tp-ep", "expert_tp-ep-pp")
"""Groups of the routed experts."""
_OWN = frozenset({"pp", "mirror"})
"""Groups that share torch's with no other."""
WORLD_AXES = "tp-cp-dp-pp"
"""The group of all ranks."""
_DEFAULT_STALL_TIMEOUT_S = 60.0
"""How long a selected collective algorithm may make no progress, by default."""


def list_algorithm_problems(layout: Layout, algorithms: AlgorithmsByGroup) -> list[Problem]:
    """Return what of a choice of algorithms a layout's groups cannot do, each with a fix."""

    def ranks(axes: str) -> int:
        # Groups of one name are equally large; of those that not all ranks are in, the first is.
        return len(get_process_group(layout, 0, axes)) or 1

    return find_algorithm_problems(algorithms, ranks, (*AXES, *EXPERT_AXES))


class Mesh:
    """Where this process stands, and its groups by the axes along which their ranks differ."""

    def __init__(
        self,
        layout: Layout,
        *,
        device: torch.device | str = "cpu",
        timeout_s: float | None = None,
        algorithms: AlgorithmsByGroup | None = None,
        recorder: TimelineRecorder | None = None,
    ) -> None:
        """Make the groups; every rank of the running process group does so at the same point.

        Without a process group the layout has to be one of a single device. `timeout_s` is how
        long a collective may take before torch gives up. `algorithms` names, for some groups and
        operations, what carries them out instead of the backend; `recorder` writes all of them
        into a timeline.
        """
        ready = dist.is_initialized()
        world, self.rank = (dist.get_world_size(), dist.get_rank()) if ready else (1, 0)
        if world != layout.gpus:
            what = f"the layout has {layout.gpus} ranks, {world} were started"
            fix = f"start {layout.gpus} processes, or give the layout tp × cp × pp × dp = {world}"
            raise InputError([Problem("layout", what, fix)])
        self._algorithms: Mapping[str, Mapping[str, str]] = algorithms or {}
        every = (*AXES, *EXPERT_AXES)
        wrong = list_algorithm_problems(layout, self._algorithms)
        if wrong:
            raise InputError(wrong)
        self.layout, self.device = layout, torch.device(device)
        self.coordinate = get_coordinate(layout, self.rank)
        self.expert_coordinate = get_expert_coordinate(layout, self.rank)
        self.flight_recorder = FlightRecorder()
        self.background_recorder = FlightRecorder()
        """Of what goes on beside training, at its own pace: checkpoints."""
        self.recorder = recorder
        self._timeout = None if timeout_s is None else timedelta(seconds=timeout_s)
        self._handles: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self._groups: dict[str, GroupCoordinator] = {}
        self._teams: dict[tuple[int, ...], RankCommunicator] = {}
        for axes in every:
            self._groups[axes] = self._make(axes, get_process_group(layout, self.rank, axes))
        for count in range(2, layout.tp):
            # Neighbours that hold the same heads, should a model have fewer of them than ranks.
            if layout.tp % count == 0:
                self.get_subgroup("tp", count)
        if layout.schedule == "dualpipe" and layout.pp > 1:
            # Each rank holds the layers of the one as far from the other end as well.
            line, index = self._groups["pp"].ranks, self.coordinate.pp
            pair = sorted((line[index], line[-1 - index]))
            self._groups["mirror"] = self._make("mirror", tuple(pair))

    def __getitem__(self, axes: str) -> GroupCoordinator:
        """Return the group of ranks that differ from this one only along some axes."""
        return self._groups[axes]

    @property
    def world(self) -> GroupCoordinator:
        """All ranks."""
        return self._groups[WORLD_AXES]

    @property
    def recorder(self) -> TimelineRecorder | None:
        """Who writes what is exchanged into a timeline; None where nobody does."""
        return self.flight_recorder.timeline_recorder

    @recorder.setter
    def recorder(self, recorder: TimelineRecorder | None) -> None:
        self.flight_recorder.timeline_recorder = recorder

    def connect_groups(self, used: Iterable[GroupCoordinator]) -> None:
        """Let the backend connect some groups now, where it would do so at their first use.

        NCCL makes a communicator with the first collective, and the way between two ranks with
        their first message; whoever comes first waits for the others, in the middle of a step.
        Every rank calls it at the same point, with those of its groups that it will use; members of
        a group must agree. Gloo has connected by now.
        """
        wanted = {id(group.process_group): group for group in used if group.size > 1}
        # The same order on all ranks, or they would wait for each other for ever.
        for group in self._groups.values():
            if group.size > 1 and wanted.pop(id(group.process_group), None) is not None:
                group.warm_up(self.device)

    def close(self) -> None:
        """End the threads of algorithms of choice; groups are torch's to end."""
        for team in self._teams.values():
            team.close()
        self._teams = {}

    def get_subgroup(self, axes: str, count: int) -> GroupCoordinator:
        """Return the run of so many neighbouring ranks of a group that this one is in."""
        group = self._groups[axes]
        name = f"{axes}/{count}"
        if name not in self._groups:
            first = group.index // count * count
            self._groups[name] = self._make(name, group.ranks[first : first + count])
        return self._groups[name]

    def get_cross_group(self, axes: str, count: int) -> GroupCoordinator:
        """Return the ranks of a group that stand where this one does in their run of so many."""
        group = self._groups[axes]
        name = f"{axes}%{count}"
        if name not in self._groups:
            self._groups[name] = self._make(name, group.ranks[group.index % count :: count])
        return self._groups[name]

    def _make(self, axes: str, ranks: tuple[int, ...]) -> GroupCoordinator:
        if not ranks:
            # A rank between the ends of a pipeline is in no group of the ends. It makes one all the
            # same: torch names a group by how many there are, which has to agree between members.
            ranks = (self.rank,)
            self._new(ranks, alone=True)
        handle = None
        if len(ranks) > 1:
            key = (axes if axes in _OWN else "", ranks)
            if key not in self._handles:
                self._handles[key] = self._new(ranks, alone=axes in _OWN)
            handle = self._handles[key]
        chosen = None
        if handle is not None and self._algorithms.get(axes):
            if ranks not in self._teams:
                timeout = self._timeout or timedelta(seconds=_DEFAULT_STALL_TIMEOUT_S)
                self._teams[ranks] = RankCommunicator(handle, timeout_s=timeout.total_seconds())
            chosen = SelectedAlgorithms(self._algorithms[axes], self._teams[ranks])
        return GroupCoordinator(axes, ranks, self.rank, handle, self.flight_recorder, chosen=chosen)

    def _new(self, ranks: tuple[int, ...], *, alone: bool) -> dist.ProcessGroup:
        if not alone and len(ranks) == self.layout.gpus and dist.group.WORLD is not None:
            return dist.group.WORLD
        # Members alone make it: others may be in stages that never ask for it. It is never given
        # back, as torch would meet the addresses of the old one under the same name.
        made = dist.new_group(list(ranks), timeout=self._timeout, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup), "this rank is a member"
        return made
