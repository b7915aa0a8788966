"""A worker that kills itself once at a phase: `DYING` holds it, and a file that is removed then."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.run.posttrain.weights import arrivals, shared_memory
from meshwright.run.posttrain.workers import process
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.start import start_engine
from meshwright.run.serve.worker import process as serving
from meshwright.run.serve.worker.frames import Answered, Beat

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


def half(own: arrivals.Arrivals) -> None:
    """Write a part of the second version, and die."""
    if own._expected == 2:
        own.mine = own.mine[:1]
        for place in own.places.values():
            place.placed.tensor.zero_()
        die()
    written(own)


written = arrivals.Arrivals._write
PHASES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "starting": (process, "start_engine", after(1, start_engine)),
    "drawing": (Engine, "turn", after(12, Engine.turn)),
    "answering": (serving._Socket, "send", after(3, serving._Socket.send, counted=Answered)),
    "idle": (serving._Socket, "send", after(2, serving._Socket.send, counted=Beat)),
    "reading weights": (
        shared_memory.Fetched, "gather", after(2, shared_memory.Fetched.gather)
    ),
    "writing weights": (arrivals.Arrivals, "_write", half),
}  # fmt: skip

if __name__ == "__main__":
    where, name, instead = PHASES[os.environ["DYING"].partition(":")[0]]
    setattr(where, name, instead)
    process.main(sys.argv[1])
