"""A run with workers whose trainer kills itself: `killed.py FOLDER PHASE`; it names its workers."""

import os
import sys
from typing import Any

from meshwright.run.posttrain.rl import RLConfig, rl_run
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.run.posttrain.workers.worker_link import ProcessWorkerLink
from meshwright.run.serve.worker.protocol import StartEngine
from tests.run.posttrain.rl.killed import PHASES, STEPS
from tests.run.posttrain.rl.small import settings


def settings_of(folder: str) -> RLConfig:
    return settings(
        folder=folder, steps=STEPS, checkpoint_every_steps=2, workers=WorkerConfig(num_workers=2)
    )


class Named(ProcessWorkerLink):
    """Says which process it started."""

    def __init__(self, start: StartEngine, patience_s: float, start_s: float) -> None:
        super().__init__(start, patience_s, start_s)
        print(self.pid, flush=True)


if __name__ == "__main__":
    from meshwright.run.posttrain.workers import pool_startup

    where, name, instead = PHASES[sys.argv[2]]
    setattr(where, name, instead)
    replaced: Any = pool_startup
    replaced.ProcessWorkerLink = Named
    print(os.getpid(), flush=True)
    rl_run.run_rl(settings_of(sys.argv[1]))
