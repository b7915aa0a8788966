"""A trainer that dies when its workers have weights, and workers that speak only after that."""

import os
import signal
import sys
from typing import Any

from meshwright.run.posttrain.workers import hiring, links, process
from meshwright.run.posttrain.workers.settings import WorkerSettings
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.worker import process as serving
from meshwright.run.serve.worker.frames import Beat, Done, FromWorker
from tests.run.posttrain.workers.killed import Named
from tests.run.serve.model.small import small

CALLS = 2
"""What a trainer calls for until a worker has weights: sources, and a version."""
said, done = serving._Socket.send, list[Done]()


def late(way: serving._Socket, message: FromWorker) -> None:
    """Speak; after the last call not before the other side is gone."""
    if isinstance(message, Done):
        done.append(message)
    if len(done) == CALLS and isinstance(message, Beat):
        way.is_gone(60)
    said(way, message)


def train() -> None:
    """Give workers a version, and die."""
    replaced: Any = links
    replaced.MODULE = __spec__.name
    replaced = hiring
    replaced.ProcessLink = Named
    print(os.getpid(), flush=True)
    decoder = small()
    fleet = hiring.fleet_of(
        decoder, decoder.model, EngineSettings(device="cpu"), WorkerSettings(count=2),
        threads=1, stall_s=300, exact=True, say=print,
    )  # fmt: skip
    fleet.take(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        train()
    else:
        replaced: Any = serving._Socket
        replaced.send = late
        process.main(sys.argv[1])
