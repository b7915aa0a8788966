"""Workers on the machines of a Ray cluster: an actor keeps the process of each.

Ray decides where they run, carries messages, and brings versions of weights to each machine through
its object store; there they lie in shared memory, where the worker's process checks and takes them
as it does beside the trainer. A worker whose process, actor or machine is gone is started anew
wherever there is room. All machines need this package, and one Python version.
"""

import contextlib
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.run.posttrain.weight_sync.weight_sender import WeightSender, make_version_folder
from meshwright.run.posttrain.workers.deadline import DeadlineExceededError, call_with_deadline
from meshwright.run.posttrain.workers.worker_link import ProcessWorkerLink
from meshwright.run.serve.client.engine_process import EngineStartTimeoutError
from meshwright.run.serve.engine_client import EngineDeadError
from meshwright.run.serve.worker.protocol import (
    EngineMessage,
    EngineReady,
    StartEngine,
    WorkerMessage,
    worker_message_decoder,
)

if TYPE_CHECKING:
    from types import ModuleType


_LISTEN_S = 1.0
"""How long an actor waits for its worker to say something before it says that it said nothing."""

_END_S = 5.0


class RayTimeoutError(MeshwrightError):
    """A Ray cluster did not do in time what it was asked for."""


_encode = msgspec.msgpack.encode

_heard = msgspec.msgpack.Decoder(list[EngineMessage])


class _Begun(msgspec.Struct):
    """How the start of a worker went, as plain values."""

    ready: EngineReady | None = None
    name: str = ""
    pid: int = 0
    folder: str = ""
    problems: list[tuple[str, str, str]] = []
    broken: str = ""
    late: bool = False


class RayWorkerActor:
    """Keeps the process of a worker; it lives in an actor, and is called by several threads."""

    def __init__(self) -> None:
        self._link: ProcessWorkerLink | None = None
        self._folder = str(make_version_folder())
        self._said: queue.SimpleQueue[EngineMessage | None] = queue.SimpleQueue()
        self._turn, self._next, self._wrong = threading.Lock(), 0, ""
        self._waiting: dict[int, Callable[[], None]] = {}

    def start(self, start: bytes, patience_s: float, start_s: float) -> bytes:
        """Start the process, and wait until its engine is ready, for so long at most."""
        first = worker_message_decoder.decode(start)
        assert isinstance(first, StartEngine), "a worker begins with a start"
        try:
            self._link = link = ProcessWorkerLink(first, patience_s, start_s)
        except InputError as error:
            told = [(each.where, each.what, each.fix) for each in error.problems]
            return _encode(_Begun(problems=told))
        except EngineDeadError as error:
            late = isinstance(error, EngineStartTimeoutError)
            return _encode(_Begun(broken=str(error), late=late))
        threading.Thread(target=self._listen, args=(link,), daemon=True).start()
        where = f"{link.name} on {os.uname().nodename}"
        return _encode(
            _Begun(ready=link.ready_message, name=where, pid=link.pid, folder=self._folder)
        )

    def send(self, number: int, message: bytes) -> None:
        """Hand a message on, when all before it were."""
        decoded = worker_message_decoder.decode(message)
        self._in_turn(number, lambda: self._process.send(decoded))

    def deliver_version(self, number: int, place: str, names: list[str], *files: Any) -> None:
        """Lay a version out on this machine, in its turn among the messages."""
        self._in_turn(number, lambda: self._lay_out(place, names, files))

    def receive_messages(self) -> bytes | None:
        """Return what the worker said, waiting for it for a while; None when it is gone."""
        found: list[EngineMessage] = []
        with contextlib.suppress(queue.Empty):
            message = self._said.get(timeout=_LISTEN_S)
            while message is not None:
                found.append(message)
                message = self._said.get_nowait()
            if not found:
                return None
            self._said.put(None)  # heard by the next call
        return None if self._wrong else _encode(found)

    def exit_reason(self) -> str:
        """Say how it ended."""
        return self._wrong or self._process.exit_reason()

    def stop(self) -> None:
        """End the process, and give the memory of versions back."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._link is not None:
            self._link.stop()

    @property
    def _process(self) -> ProcessWorkerLink:
        assert self._link is not None, "it was begun"
        return self._link

    def _listen(self, link: ProcessWorkerLink) -> None:
        for message in link.receive_messages():
            self._said.put(message)
        self._said.put(None)

    def _in_turn(self, number: int, action: Callable[[], None]) -> None:
        """Do things in the order of their numbers: calls may come in any."""
        with self._turn:
            self._waiting[number] = action
            while (ready := self._waiting.pop(self._next, None)) is not None:
                self._next += 1
                try:
                    ready()
                except OSError as error:
                    self._wrong = f"cannot write weights to {self._folder}: {error}"

    def _lay_out(self, place: str, names: list[str], files: Sequence[Any]) -> None:
        folder = Path(self._folder) / place
        for old in folder.parent.glob("version-*"):
            shutil.rmtree(old, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, data in zip(names, files, strict=True):
            part = folder / f"{name}.part"
            data.tofile(part)
            part.rename(folder / name)


class RayWorkerLink:
    """The way to a worker that an actor keeps."""

    def __init__(
        self,
        ray: "ModuleType",
        actor: Any,
        start: StartEngine,
        shelf: "_ObjectStoreVersions",
        *,
        patience_s: float,
        start_s: float,
    ) -> None:
        """Wait until its engine is ready, for `start_s`; raises what keeps it from that.

        Who says nothing for `patience_s` afterwards is taken to be gone.
        """
        self._ray, self._actor, self._shelf = ray, actor, shelf
        # An actor with nothing to say answers so after each of its own waits.
        self._numbers, self._why, self._has_frozen = count(), "", False
        self._patience_s = max(patience_s, 10 * _LISTEN_S)
        begin = actor.start.remote(_encode(start), patience_s, start_s)
        try:
            begun = msgspec.msgpack.decode(ray.get(begin, timeout=start_s), type=_Begun)
        except ray.exceptions.GetTimeoutError as error:
            # A cluster without room keeps the actor waiting; an actor takes its process along.
            ray.kill(actor)
            what = f"its Ray actor has no engine that is ready within {start_s:g} s"
            raise EngineStartTimeoutError(f"{what}: look for room in the cluster") from error
        except ray.exceptions.RayError as error:
            raise EngineDeadError(f"its Ray actor is gone: {_first_line(error)}") from error
        if begun.ready is None:
            self.stop()
            if begun.problems:
                raise InputError([Problem(*each) for each in begun.problems])
            raise (EngineStartTimeoutError if begun.late else EngineDeadError)(begun.broken)
        self.ready_message, self.name, self.pid = begun.ready, begun.name, begun.pid
        self._folder = begun.folder

    def send(self, message: WorkerMessage, /) -> None:
        """Send a message."""
        self._actor.send.remote(next(self._numbers), _encode(message))

    def receive_messages(self) -> Iterator[EngineMessage]:
        """Yield what it says."""
        while True:
            try:
                said = self._ray.get(
                    self._actor.receive_messages.remote(), timeout=self._patience_s
                )
            except self._ray.exceptions.GetTimeoutError:
                self._why = f"its Ray actor said nothing for {self._patience_s:g} s"
                return
            except self._ray.exceptions.RayError as error:
                self._why = f"its Ray actor is gone: {_first_line(error)}"
                return
            if said is None:
                return
            yield from _heard.decode(said)

    def exit_reason(self) -> str:
        """Say how it ended."""
        if not self._why:
            try:
                self._why = self._ray.get(self._actor.exit_reason.remote(), timeout=_END_S)
            except self._ray.exceptions.RayError as error:
                self._why = f"its Ray actor is gone: {_first_line(error)}"
        return self._why

    def version_folder(self, sender: WeightSender, /) -> str:
        """Return where it finds versions: in the memory of its own machine."""
        del sender
        return self._folder

    def deliver_version(self, sender: WeightSender, /) -> None:
        """Send the last version to its machine; what is said afterwards comes after it."""
        assert sender.version is not None, "a version was published"
        if not self._has_frozen:
            self._has_frozen = True
            self._send(self._shelf.frozen(sender))
        self._send(self._shelf.newest(sender))

    def _send(self, stored: "_Stored") -> None:
        for place, names, files in stored:
            self._actor.deliver_version.remote(next(self._numbers), place, names, *files)

    def stop(self) -> None:
        """End it."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actor.stop.remote(), timeout=_END_S)
        self._ray.kill(self._actor)


_Stored = list[tuple[str, list[str], list[Any]]]
"""Folders, from that of all versions on, with the names of their files and where these are kept."""


class _ObjectStoreVersions:
    """What is offered in the object store of a cluster, once for all its workers."""

    def __init__(self, ray: "ModuleType", within_s: float) -> None:
        self._ray, self._within_s, self._version = ray, within_s, -1
        self._newest: _Stored = []
        self._frozen: _Stored | None = None

    def newest(self, sender: WeightSender) -> _Stored:
        """Return the last version."""
        if sender.version != self._version:
            self._newest = self._put(sender, sender.list_files())
            self._version = -1 if sender.version is None else sender.version
        return self._newest

    def frozen(self, sender: WeightSender) -> _Stored:
        """Return what changes with no version, for workers that begin; mostly nothing."""
        if self._frozen is None:
            self._frozen = self._put(sender, sender.list_frozen_files())
        return self._frozen

    def _put(self, sender: WeightSender, paths: Sequence[Path]) -> _Stored:
        if not paths:
            return []
        place = str(paths[0].parent.relative_to(sender.folder))
        try:
            # A store without room waits until it has some.
            files = call_with_deadline(lambda: self._stored(paths), self._within_s, "Ray's store")
        except DeadlineExceededError as error:
            what = f"Ray's object store has not received version {sender.version}"
            fix = "give it more memory (object_store_memory), or raise stall_timeout_s"
            raise RayTimeoutError(f"{what} within {self._within_s:g} s: {fix}") from error
        return [(place, [path.name for path in paths], files)]

    def _stored(self, paths: Sequence[Path]) -> list[Any]:
        return [self._ray.put(np.fromfile(path, np.uint8)) for path in paths]


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
