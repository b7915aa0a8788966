"""What runs in the process of a rollout worker: the serving worker, which also takes versions."""

import os
import shutil
import time
from functools import partial

import msgspec

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.run.posttrain.weights.taking import TAKING, Taking, learn, take_version
from meshwright.run.serve.engine.doing import HalfRenewed
from meshwright.run.serve.engine.start import Started, start_engine
from meshwright.run.serve.engine.vectors import Vectors
from meshwright.run.serve.worker import process
from meshwright.run.serve.worker.frames import Call, Done, Start
from meshwright.run.serve.worker.worker import Perform, performer

MODULE = "meshwright.run.posttrain.workers"
SOURCES, TAKE = "learn what is offered", "take a version"
"""What a trainer calls a worker for, besides what a server does."""
_LOOKS, _LOOK_S = 600, 0.1
"""A killed trainer is there for a while after its sockets are gone: seconds where a machine is
busy, or a driver frees its GPUs. One that lives ends this process before the last look."""


class _Worker:
    """The engine of this process, and what is left behind where its trainer is killed."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._folder = ""

    def begin(self, first: Start) -> tuple[Started, Perform]:
        """Start an engine whose ranks take versions."""
        started = start_engine(first.source, first.settings, ranks=TAKING)
        return started, partial(self._perform, started, performer(started.upkeep))

    def _perform(self, started: Started, others: Perform, call: Call) -> Done | Vectors:
        engine, upkeep = started.engine, started.upkeep
        try:
            if call.what == SOURCES:
                targets = learn(call.told, upkeep)
                assert isinstance(upkeep.first, Taking), "it has just learned"
                self._folder = upkeep.first.folder
                return Done(call.number, told=msgspec.msgpack.encode(targets))
            if call.what == TAKE:
                take_version(call.version, engine, upkeep)
                return Done(call.number)
        except (InputError, HalfRenewed):
            # With half a version this process is of no use: it ends, and the next one takes it.
            raise
        except MeshwrightError as error:
            raise InputError([Problem("weights", str(error), "")]) from error
        return others(call)

    def orphaned(self) -> None:
        """Give back the memory of versions that a killed trainer left; a living one does so."""
        for _ in range(_LOOKS):
            if not self._folder or not os.path.isdir(self._folder):  # noqa: PTH112
                return
            if os.getppid() != self._parent:
                shutil.rmtree(self._folder, ignore_errors=True)
                return
            time.sleep(_LOOK_S)


def main(path: str) -> None:
    """Draw for whoever listens at a socket."""
    worker = _Worker()
    process.main(path, worker.begin, worker.orphaned)
