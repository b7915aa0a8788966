"""A trainer that dies when its workers have weights, and workers that speak only after that."""

import os
import signal
import sys
from typing import Any

from meshwright.run.posttrain.workers import pool_startup, worker_link, worker_main
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.worker import worker_process
from meshwright.run.serve.worker.protocol import EngineHeartbeat, EngineMessage, UtilityResult
from tests.run.posttrain.workers.killed import Named
from tests.run.serve.model.small import small

CALLS = 2
"""What a trainer calls for until a worker has weights: sources, and a version."""
said, done = worker_process._Socket.send, list[UtilityResult]()


def late(way: worker_process._Socket, message: EngineMessage) -> None:
    """Speak; after the last call not before the other side is gone."""
    if isinstance(message, UtilityResult):
        done.append(message)
    if len(done) == CALLS and isinstance(message, EngineHeartbeat):
        way.is_gone(60)
    said(way, message)


def train() -> None:
    """Give workers a version, and die."""
    replaced: Any = worker_link
    replaced.WORKER_MODULE = __spec__.name
    replaced = pool_startup
    replaced.ProcessWorkerLink = Named
    print(os.getpid(), flush=True)
    decoder = small()
    fleet = pool_startup.start_worker_pool(
        decoder, decoder.model, EngineConfig(device="cpu"), WorkerConfig(num_workers=2),
        threads=1, stall_timeout_s=300, exact=True, say=print,
    )  # fmt: skip
    fleet.load_version(1)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        train()
    else:
        replaced: Any = worker_process._Socket
        replaced.send = late
        worker_main.main(sys.argv[1])
