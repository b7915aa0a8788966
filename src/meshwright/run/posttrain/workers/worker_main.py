"""What runs in the process of a rollout worker: the serving worker, which also takes versions."""

import os
import shutil
import time
from functools import partial

import msgspec

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.run.posttrain.weight_sync.weight_receiver import (
    RECEIVING_RANKS,
    RankWeightReceiver,
    plan_on_all_ranks,
    receive_version,
)
from meshwright.run.serve.engine.embeddings import EmbeddingJob
from meshwright.run.serve.engine.executor.rank_commands import PartialUpdateError
from meshwright.run.serve.engine.startup import StartedEngine, start_engine
from meshwright.run.serve.worker import worker_process
from meshwright.run.serve.worker.engine_worker import UtilityHandler, create_utility_handler
from meshwright.run.serve.worker.protocol import StartEngine, UtilityCall, UtilityResult

WORKER_MODULE = "meshwright.run.posttrain.workers"
SOURCES, TAKE = "learn what is available", "take a version"
"""What a trainer calls a worker for, besides what a server does."""
_LOOKS, _LOOK_S = 600, 0.1
"""A killed trainer is there for a while after its sockets are gone: seconds where a machine is
busy, or a driver frees its GPUs. One that lives ends this process before the last look."""


class _Worker:
    """The engine of this process, and what is left behind where its trainer is killed."""

    def __init__(self) -> None:
        self._parent = os.getppid()
        self._folder = ""

    def begin(self, first: StartEngine) -> tuple[StartedEngine, UtilityHandler]:
        """Start an engine whose ranks take versions."""
        started = start_engine(first.source, first.config, ranks=RECEIVING_RANKS)
        return started, partial(self._perform, started, create_utility_handler(started.lifecycle))

    def _perform(
        self, started: StartedEngine, others: UtilityHandler, call: UtilityCall
    ) -> UtilityResult | EmbeddingJob:
        engine, upkeep = started.engine, started.lifecycle
        try:
            if call.method == SOURCES:
                targets = plan_on_all_ranks(call.payload, upkeep)
                assert isinstance(upkeep.run_on_first_rank, RankWeightReceiver), (
                    "it has just learned"
                )
                self._folder = upkeep.run_on_first_rank.folder
                return UtilityResult(call.call_id, payload=msgspec.msgpack.encode(targets))
            if call.method == TAKE:
                receive_version(call.version, engine, upkeep)
                return UtilityResult(call.call_id)
        except (InputError, PartialUpdateError):
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
    worker_process.main(path, worker.begin, worker.orphaned)
