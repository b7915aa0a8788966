"""The logs of one job put together: which ends make one communicator, and who said what."""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from meshwright.timeline.readers.nccl_log.nccl_log_reader import assign_ranks
from meshwright.timeline.readers.nccl_log.nccl_log_records import (
    ChannelConnection,
    Communicator,
    NcclLog,
)

_SETTING = re.compile(r"(NCCL_\w+) set by environment to (.*)")


def parse_transport(transport: str) -> str:
    """What carries the data, without which NIC or buffer: `NET/IB`, `P2P`."""
    parts = transport.split("/")
    return "/".join(parts[:2]) if parts[0] == "NET" else parts[0]


class NcclJob:
    """What all logs say together."""

    def __init__(self, log: NcclLog) -> None:
        self.log = log
        self.groups: list[list[Communicator]] = []
        """The ends of each communicator, one a rank."""
        self._places: dict[str, int] = {}
        """By id, and by address where there is no id."""
        self._group()

    @classmethod
    def from_logs(cls, logs: Sequence[NcclLog]) -> "NcclJob":
        """Put the logs of processes together."""
        return cls(
            NcclLog(
                Path(logs[0].path),
                logs[0].version,
                tuple(one for log in logs for one in log.communicators),
                tuple(one for log in logs for one in log.connections),
                tuple(one for log in logs for one in log.rings),
                tuple(one for log in logs for one in log.trees),
                tuple(one for log in logs for one in log.calls),
                tuple(one for log in logs for one in log.warnings),
                tuple(dict.fromkeys(note for log in logs for note in log.notes)),
                tuple(dict.fromkeys(one for log in logs for one in log.process_facts)),
            )
        )

    def _group(self) -> None:
        """By id; without one, ends of one size whose ranks differ are taken together."""
        unnamed: dict[int, int] = {}
        for end in self.log.communicators:
            place = self._places.get(end.id) if end.id else unnamed.get(end.num_ranks)
            if place is not None and not end.id:
                taken = {other.rank for other in self.groups[place]}
                place = None if end.rank in taken else place
            if place is None:
                place = len(self.groups)
                self.groups.append([])
            self._places[end.id or end.address] = place
            if not end.id:
                unnamed[end.num_ranks] = place
            others = [other for other in self.groups[place] if other.rank != end.rank]
            self.groups[place] = [*others, end]

    def find_group_index(self, communicator: str) -> int:
        """Which of the groups a line names by id or address; -1 where it is not known."""
        return self._places.get(communicator, -1)

    def connection_scope(self, connection: ChannelConnection) -> tuple[object, ...]:
        """Within what the ranks of a connection are counted."""
        place = self.find_group_index(connection.communicator)
        return (place,) if place >= 0 else (connection.host, connection.pid)

    def num_channels(self, place: int) -> int:
        """As NCCL says it, else as many as have rings; 0 where neither is printed."""
        said = max(end.num_channels for end in self.groups[place])
        return said or self._ring_channels.get(place, 0)

    @cached_property
    def _ring_channels(self) -> dict[int, int]:
        found: dict[int, set[int]] = {}
        for ring in self.log.rings:
            found.setdefault(self.find_group_index(ring.communicator), set()).add(ring.channel)
        return {place: len(channels) for place, channels in found.items()}

    def list_facts(self, subject: str) -> tuple[str, ...]:
        """All that processes say of a subject, each once."""
        return tuple(
            dict.fromkeys(one.value for one in self.log.process_facts if one.subject == subject)
        )

    @cached_property
    def env_settings(self) -> tuple[tuple[str, str], ...]:
        """Names and values of the environment that NCCL took."""
        found = [_SETTING.match(text) for text in self.list_facts("setting")]
        return tuple((one[1], one[2]) for one in found if one)

    def format_env_settings(self, *names: str) -> tuple[str, ...]:
        """`NAME=VALUE` of those of these that are set."""
        return tuple(f"{name}={value}" for name, value in self.env_settings if name in names)

    @cached_property
    def ranks(self) -> dict[tuple[str, int, int], int]:
        """By host, process and device: the rank in its largest communicator."""
        return assign_ranks(self.log)

    def find_rank(self, connection: ChannelConnection) -> int | None:
        """Whose line it is, as a rank of the job."""
        place = self.find_group_index(connection.communicator)
        own = connection.target if connection.direction == "receive" else connection.source
        for end in self.groups[place] if place >= 0 else ():
            if end.rank == own:
                return self.ranks.get((end.host, end.pid, end.device))
        return self._by_process.get((connection.host, connection.pid))

    @cached_property
    def _by_process(self) -> dict[tuple[str, int], int]:
        return {(host, process): rank for (host, process, _), rank in self.ranks.items()}

    def find_ranks(self, host: str, process: int, device: int = -1) -> tuple[int, ...]:
        """The ranks of a process, or of one of its devices."""
        own = self.ranks.get((host, process, device))
        if own is not None:
            return (own,)
        known = self._by_process.get((host, process))
        return () if known is None else (known,)
