"""A run with workers whose trainer kills itself: `killed.py FOLDER PHASE`; it names its workers."""

import os
import sys
from typing import Any

from meshwright.run.posttrain.loop import LoopSettings, running
from meshwright.run.posttrain.workers.links import ProcessLink
from meshwright.run.posttrain.workers.settings import WorkerSettings
from meshwright.run.serve.worker.frames import Start
from tests.run.posttrain.loop.killed import PHASES, STEPS
from tests.run.posttrain.loop.small import settings


def settings_of(folder: str) -> LoopSettings:
    return settings(folder=folder, steps=STEPS, checkpoint_steps=2, workers=WorkerSettings(count=2))


class Named(ProcessLink):
    """Says which process it started."""

    def __init__(self, start: Start, patience_s: float, start_s: float) -> None:
        super().__init__(start, patience_s, start_s)
        print(self.pid, flush=True)


if __name__ == "__main__":
    from meshwright.run.posttrain.workers import hiring

    where, name, instead = PHASES[sys.argv[2]]
    setattr(where, name, instead)
    replaced: Any = hiring
    replaced.ProcessLink = Named
    print(os.getpid(), flush=True)
    running.run(settings_of(sys.argv[1]))
