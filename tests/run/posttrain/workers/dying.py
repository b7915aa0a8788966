"""A worker that kills itself once at a phase: `DYING` holds it, and a file that is removed then."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.run.posttrain.weight_sync import shared_memory_transfer, weight_buffer
from meshwright.run.posttrain.workers import worker_main
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.startup import start_engine
from meshwright.run.serve.worker import worker_process
from meshwright.run.serve.worker.protocol import EngineHeartbeat, EngineOutputs

MODULE = "tests.run.posttrain.workers.dying"


def die() -> None:
    phase, _, file = os.environ["DYING"].partition(":")
    try:
        Path(file).unlink()
    except FileNotFoundError:
        return  # some worker has died already
    del phase
    os.kill(os.getpid(), signal.SIGKILL)


def after(count: int, what: Callable[..., Any], *, counted: Any = None) -> Callable[..., Any]:
    """Do a thing; die before it has been done so many times."""
    left = count

    def called(*given: Any, **named: Any) -> Any:
        nonlocal left
        if counted is None or isinstance(given[-1], counted):
            left -= 1
            if left == 0:
                die()
        return what(*given, **named)

    return called


def half(own: weight_buffer.WeightBuffer) -> None:
    """Write a part of the second version, and die."""
    if own._expected == 2:
        own.buckets = own.buckets[:1]
        for place in own.targets.values():
            place.sharded_tensor.tensor.zero_()
        die()
    written(own)


written = weight_buffer.WeightBuffer._write
PHASES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "starting": (worker_main, "start_engine", after(1, start_engine)),
    "drawing": (Engine, "step", after(12, Engine.step)),
    "answering": (worker_process._Socket, "send",
                  after(3, worker_process._Socket.send, counted=EngineOutputs)),
    "idle": (worker_process._Socket, "send",
             after(2, worker_process._Socket.send, counted=EngineHeartbeat)),
    "reading weights": (
        shared_memory_transfer.SharedMemoryReader, "verify", after(2,
        shared_memory_transfer.SharedMemoryReader.verify)
    ),
    "writing weights": (weight_buffer.WeightBuffer, "_write", half),
}  # fmt: skip

if __name__ == "__main__":
    where, name, instead = PHASES[os.environ["DYING"].partition(":")[0]]
    setattr(where, name, instead)
    worker_main.main(sys.argv[1])
