"""Agents that copy within this process, as strict about names and rooms as NIXL's are.

They also fail as told: `Fake.states` are said before a transfer is done, `Fake.broken` is raised.
"""

import ctypes
import json
import weakref
from types import SimpleNamespace
from typing import ClassVar


class FakeError(Exception):
    """As NIXL's errors: of no common base."""


Place = tuple[int, int]


class Fake:
    """An agent."""

    agents: ClassVar[weakref.WeakValueDictionary[str, "Fake"]] = weakref.WeakValueDictionary()
    states: ClassVar[list[str]] = []
    broken: ClassVar[str] = ""
    mem_types: ClassVar[list[str]] = ["DRAM_SEG"]

    def __init__(self, name: str, config: SimpleNamespace) -> None:
        assert config.backends == ["UCX"]
        if Fake.broken == "start":
            raise FakeError("NIXL_ERR_BACKEND")
        self.name, self.rooms, self.known = name, set[Place](), dict[str, set[Place]]()
        self.released = 0
        Fake.agents[name] = self

    def get_backend_mem_types(self, backend: str) -> list[str]:
        assert backend == "UCX"
        return Fake.mem_types

    def register_memory(self, rooms: list[tuple[int, int, int, str]], kind: str) -> Place:
        assert kind == "DRAM"
        ((address, size, _, _),) = rooms
        self.rooms.add((address, size))
        return address, size

    def deregister_memory(self, registered: Place) -> None:
        if Fake.broken == "end":
            raise FakeError("NIXL_ERR_BACKEND")
        self.rooms.remove(registered)

    def get_partial_agent_metadata(self, room: Place, connects: bool, over: list[str]) -> bytes:
        assert connects
        assert over == ["UCX"]
        return json.dumps([self.name, *room]).encode()

    def add_remote_agent(self, card: bytes) -> bytes:
        try:
            name, *place = json.loads(card)
        except ValueError:
            raise FakeError("NIXL_ERR_MISMATCH") from None
        self.known.setdefault(name, set()).add(tuple(place))
        return str(name).encode()

    def remove_remote_agent(self, name: str) -> None:
        if self.known.pop(name, None) is None:
            raise FakeError("NIXL_ERR_NOT_FOUND")

    def get_xfer_descs(self, places: list[tuple[int, int, int]], kind: str) -> Place:
        assert kind == "DRAM"
        ((address, size, _),) = places
        return address, size

    def initialize_xfer(self, what: str, here: Place, there: Place, name: str) -> SimpleNamespace:
        if name in self.known and name not in Fake.agents:
            raise FakeError("NIXL_ERR_REMOTE_DISCONNECT")
        if not _within(here, self.rooms) or not _within(there, self.known.get(name, set())):
            raise FakeError("NIXL_ERR_NOT_FOUND")
        return SimpleNamespace(what=what, here=here, there=there, states=[*Fake.states, "DONE"])

    def transfer(self, handle: SimpleNamespace) -> str:
        if Fake.broken == "transfer":
            raise FakeError("NIXL_ERR_REMOTE_DISCONNECT")
        return self.check_xfer_state(handle)

    def check_xfer_state(self, handle: SimpleNamespace) -> str:
        state = str(handle.states[0] if handle.states[0] == "STUCK" else handle.states.pop(0))
        if state == "ERR":
            handle.states.clear()
        if state == "DONE":
            (here, size), (there, _) = handle.here, handle.there
            ends = (here, there) if handle.what == "READ" else (there, here)
            ctypes.memmove(*ends, size)
        return "PROC" if state == "STUCK" else state

    def release_xfer_handle(self, handle: SimpleNamespace) -> None:
        assert not handle.states, "it is under way"
        self.released += 1


def _within(place: Place, rooms: set[Place]) -> bool:
    begin, size = place
    return any(at <= begin and begin + size <= at + room for at, room in rooms)
