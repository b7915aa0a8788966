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
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from meshwright.errors import InputError, MeshwrightError, MissingPart, Problem
from meshwright.policy.rollout import engine_share
from meshwright.run.posttrain.weights.offered import Offered, memory_folder
from meshwright.run.posttrain.workers.in_time import TooLate, in_time
from meshwright.run.posttrain.workers.links import ProcessLink
from meshwright.run.posttrain.workers.settings import WorkerSettings
from meshwright.run.serve.interface import EngineBroken
from meshwright.run.serve.worker.frames import FromWorker, Ready, Start, ToWorker, to_worker
from meshwright.run.serve.worker.launch import NotStarted

if TYPE_CHECKING:
    from types import ModuleType

_LISTEN_S = 1.0
"""How long an actor waits for its worker to say something before it says that it said nothing."""
_END_S = 5.0
_LEAVE_S = 30.0
"""How long Ray may take to leave a cluster, or to end one that was started here."""
LOCAL = "local"
"""What stands for a cluster that is started here, in place of an address."""


class ClusterStuck(MeshwrightError):
    """A Ray cluster did not do in time what it was asked for."""


_encode = msgspec.msgpack.encode
_heard = msgspec.msgpack.Decoder(list[FromWorker])


class _Begun(msgspec.Struct):
    """How the start of a worker went, as plain values."""

    ready: Ready | None = None
    name: str = ""
    pid: int = 0
    folder: str = ""
    problems: list[tuple[str, str, str]] = []
    broken: str = ""
    late: bool = False


class Keeper:
    """Keeps the process of a worker; it lives in an actor, and is called by several threads."""

    def __init__(self) -> None:
        self._link: ProcessLink | None = None
        self._folder = str(memory_folder())
        self._said: queue.SimpleQueue[FromWorker | None] = queue.SimpleQueue()
        self._turn, self._next, self._wrong = threading.Lock(), 0, ""
        self._waiting: dict[int, Callable[[], None]] = {}

    def begin(self, start: bytes, patience_s: float, start_s: float) -> bytes:
        """Start the process, and wait until its engine is ready, for so long at most."""
        first = to_worker.decode(start)
        assert isinstance(first, Start), "a worker begins with a start"
        try:
            self._link = link = ProcessLink(first, patience_s, start_s)
        except InputError as error:
            told = [(each.where, each.what, each.fix) for each in error.problems]
            return _encode(_Begun(problems=told))
        except EngineBroken as error:
            late = isinstance(error, NotStarted)
            return _encode(_Begun(broken=str(error), late=late))
        threading.Thread(target=self._listen, args=(link,), daemon=True).start()
        where = f"{link.name} on {os.uname().nodename}"
        return _encode(_Begun(ready=link.ready, name=where, pid=link.pid, folder=self._folder))

    def say(self, number: int, message: bytes) -> None:
        """Hand a message on, when all before it were."""
        decoded = to_worker.decode(message)
        self._in_turn(number, lambda: self._process.send(decoded))

    def bring(self, number: int, place: str, names: list[str], *files: Any) -> None:
        """Lay a version out on this machine, in its turn among the messages."""
        self._in_turn(number, lambda: self._lay_out(place, names, files))

    def heard(self) -> bytes | None:
        """Return what the worker said, waiting for it for a while; None when it is gone."""
        found: list[FromWorker] = []
        with contextlib.suppress(queue.Empty):
            message = self._said.get(timeout=_LISTEN_S)
            while message is not None:
                found.append(message)
                message = self._said.get_nowait()
            if not found:
                return None
            self._said.put(None)  # heard by the next call
        return None if self._wrong else _encode(found)

    def last_words(self) -> str:
        """Say how it ended."""
        return self._wrong or self._process.last_words()

    def end(self) -> None:
        """End the process, and give the memory of versions back."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._link is not None:
            self._link.end()

    @property
    def _process(self) -> ProcessLink:
        assert self._link is not None, "it was begun"
        return self._link

    def _listen(self, link: ProcessLink) -> None:
        for message in link.heard():
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
                    self._wrong = f"weights cannot be laid out in {self._folder}: {error}"

    def _lay_out(self, place: str, names: list[str], files: Sequence[Any]) -> None:
        folder = Path(self._folder) / place
        for old in folder.parent.glob("version-*"):
            shutil.rmtree(old, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, data in zip(names, files, strict=True):
            part = folder / f"{name}.part"
            data.tofile(part)
            part.rename(folder / name)


class RayLink:
    """The way to a worker that an actor keeps."""

    def __init__(
        self,
        ray: "ModuleType",
        actor: Any,
        start: Start,
        shelf: "_Shelf",
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
        begin = actor.begin.remote(_encode(start), patience_s, start_s)
        try:
            begun = msgspec.msgpack.decode(ray.get(begin, timeout=start_s), type=_Begun)
        except ray.exceptions.GetTimeoutError as error:
            # A cluster without room keeps the actor waiting; an actor takes its process along.
            ray.kill(actor)
            what = f"its Ray actor has no engine that is ready within {start_s:g} s"
            raise NotStarted(f"{what}: look for room in the cluster") from error
        except ray.exceptions.RayError as error:
            raise EngineBroken(f"its Ray actor is gone: {_first_line(error)}") from error
        if begun.ready is None:
            self.end()
            if begun.problems:
                raise InputError([Problem(*each) for each in begun.problems])
            raise (NotStarted if begun.late else EngineBroken)(begun.broken)
        self.ready, self.name, self.pid = begun.ready, begun.name, begun.pid
        self._folder = begun.folder

    def send(self, message: ToWorker, /) -> None:
        """Send a message."""
        self._actor.say.remote(next(self._numbers), _encode(message))

    def heard(self) -> Iterator[FromWorker]:
        """Yield what it says."""
        while True:
            try:
                said = self._ray.get(self._actor.heard.remote(), timeout=self._patience_s)
            except self._ray.exceptions.GetTimeoutError:
                self._why = f"its Ray actor said nothing for {self._patience_s:g} s"
                return
            except self._ray.exceptions.RayError as error:
                self._why = f"its Ray actor is gone: {_first_line(error)}"
                return
            if said is None:
                return
            yield from _heard.decode(said)

    def last_words(self) -> str:
        """Say how it ended."""
        if not self._why:
            try:
                self._why = self._ray.get(self._actor.last_words.remote(), timeout=_END_S)
            except self._ray.exceptions.RayError as error:
                self._why = f"its Ray actor is gone: {_first_line(error)}"
        return self._why

    def folder(self, offered: Offered, /) -> str:
        """Return where it finds versions: in the memory of its own machine."""
        del offered
        return self._folder

    def bring(self, offered: Offered, /) -> None:
        """Send the last version to its machine; what is said afterwards comes after it."""
        assert offered.version is not None, "a version was posted"
        if not self._has_frozen:
            self._has_frozen = True
            self._send(self._shelf.frozen(offered))
        self._send(self._shelf.newest(offered))

    def _send(self, stored: "_Stored") -> None:
        for place, names, files in stored:
            self._actor.bring.remote(next(self._numbers), place, names, *files)

    def end(self) -> None:
        """End it."""
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self._actor.end.remote(), timeout=_END_S)
        self._ray.kill(self._actor)


_Stored = list[tuple[str, list[str], list[Any]]]
"""Folders, from that of all versions on, with the names of their files and where these are kept."""


class _Shelf:
    """What is offered in the object store of a cluster, once for all its workers."""

    def __init__(self, ray: "ModuleType", within_s: float) -> None:
        self._ray, self._within_s, self._version = ray, within_s, -1
        self._newest: _Stored = []
        self._frozen: _Stored | None = None

    def newest(self, offered: Offered) -> _Stored:
        """Return the last version."""
        if offered.version != self._version:
            self._newest = self._put(offered, offered.files())
            self._version = -1 if offered.version is None else offered.version
        return self._newest

    def frozen(self, offered: Offered) -> _Stored:
        """Return what changes with no version, for workers that begin; mostly nothing."""
        if self._frozen is None:
            self._frozen = self._put(offered, offered.frozen_files())
        return self._frozen

    def _put(self, offered: Offered, paths: Sequence[Path]) -> _Stored:
        if not paths:
            return []
        place = str(paths[0].parent.relative_to(offered.folder))
        try:
            # A store without room waits until it has some.
            files = in_time(lambda: self._stored(paths), self._within_s, "Ray's store")
        except TooLate as error:
            what = f"Ray's object store has not taken version {offered.version}"
            fix = "give it more memory (object_store_memory), or raise stall_s"
            raise ClusterStuck(f"{what} within {self._within_s:g} s: {fix}") from error
        return [(place, [path.name for path in paths], files)]

    def _stored(self, paths: Sequence[Path]) -> list[Any]:
        return [self._ray.put(np.fromfile(path, np.uint8)) for path in paths]


class Cluster:
    """A Ray cluster that workers are hired from."""

    def __init__(
        self,
        workers: WorkerSettings,
        starts: Sequence[Start],
        patience_s: float = 150.0,
        start_s: float = 300.0,
    ) -> None:
        """Join a cluster, or start one here; messages and starts wait for so long at most."""
        self._patience_s, self._start_s = patience_s, start_s
        self._ray, self._starts = _ray(), [_within_ray(each) for each in starts]
        self._begun = not self._ray.is_initialized()
        if self._begun:
            # Ray tells its makers about the clusters it starts unless it is told not to.
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            self._join(workers.ray)
        self._shelf = _Shelf(self._ray, start_s)
        self._tp = workers.tp

    def hire(self, number: int) -> RayLink:
        """Start the worker of a number somewhere."""
        start = self._starts[number]
        gpus = self._tp if start.settings.device.startswith("cuda") else 0
        kept = self._ray.remote(Keeper).options(
            num_cpus=1, num_gpus=gpus, max_concurrency=8, scheduling_strategy="SPREAD"
        )
        waits = {"patience_s": self._patience_s, "start_s": self._start_s}
        return RayLink(self._ray, kept.remote(), start, self._shelf, **waits)

    def _join(self, address: str) -> None:
        def join() -> None:
            # To Ray, too, `local` starts one; without an address it would join what runs here.
            self._ray.init(address=address, log_to_driver=False, logging_level="warning")

        if address == LOCAL:
            # The processes of a cluster end with the thread that started them, and these starts
            # have deadlines of Ray's.
            join()
            return
        fix = "check the address, and that the cluster runs there, or raise stall_s"
        try:
            # Ray itself asks an address where nobody answers for ever.
            in_time(join, self._start_s, "Ray's cluster")
        except TooLate as error:
            what = f"no Ray cluster has answered at {address} within {self._start_s:g} s"
            raise InputError([Problem("workers.ray", what, fix)]) from error
        except ConnectionError as error:
            raise InputError([Problem("workers.ray", _first_line(error), fix)]) from error

    def close(self) -> None:
        """Leave the cluster, where this joined it."""
        if self._begun:
            try:
                in_time(self._ray.shutdown, _LEAVE_S, "Ray's shutdown")
            except TooLate:
                what = f"Ray has not left its cluster within {_LEAVE_S:g} s, and is left behind"
                warnings.warn(what, stacklevel=2)


def _within_ray(start: Start) -> Start:
    """Return a start for a machine on which Ray has chosen the GPU, which is then the worker's."""
    if not start.settings.device.startswith("cuda"):
        return start
    alone = engine_share(beside=False, by_turns=False)
    settings = msgspec.structs.replace(start.settings, device="cuda", memory_share=alone)
    return msgspec.structs.replace(start, settings=settings)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _ray() -> "ModuleType":
    try:
        import ray
    except ModuleNotFoundError:
        what = "workers on many machines need Ray, which is not installed"
        raise MissingPart(what, "pip install 'meshwright[ray]'") from None
    module: ModuleType = ray
    return module
