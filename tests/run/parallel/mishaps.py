"""What can befall a rank among others, for the tests of the alarm; each runs on every rank."""

import os
import signal
import subprocess
import time
from pathlib import Path

import torch

from meshwright.run.parallel.algorithm_selection import AlgorithmsByGroup
from meshwright.run.parallel.flight_recorder import FlightRecorder
from meshwright.run.parallel.health.collective_order import (
    CollectiveOrderCheck,
    CollectiveOrderError,
)
from meshwright.run.parallel.health.watchdog import Watchdog
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.timeline_recorder import TimelineRecorder
from meshwright.spec.layout import Layout

VICTIM = 1
PATIENCE_S = 2.0
LAYOUT = Layout(tp=2, dp=2, precision="fp32")


def suffer(folder: Path, mishap: str, algorithms: AlgorithmsByGroup | None = None) -> str:
    """Do two good steps, then one in which something befalls the victim."""
    mesh = Mesh(LAYOUT, algorithms=algorithms)
    mesh.recorder = TimelineRecorder(folder / "timeline", mesh.rank)
    with Watchdog(
        mesh, timeout_s=PATIENCE_S, folder=folder, tick_s=0.2, heartbeat_timeout_s=3.0
    ) as alarm:
        for _ in range(2):
            mesh["tp"].all_reduce(torch.ones(8))
            mesh["dp"].all_reduce(torch.ones(16))
        if mesh.rank == VICTIM:
            (folder / "began").write_text(str(time.time()))
            globals()[f"_{mishap}"](mesh, alarm)
        mesh["tp"].all_reduce(torch.ones(8))
        mesh.world.all_reduce(torch.ones(4))
    mesh.recorder.close()
    return "done"


def _dies(_: Mesh, __: Watchdog) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _sleeps(_: Mesh, __: Watchdog) -> None:
    time.sleep(60)


def _stops(_: Mesh, __: Watchdog) -> None:
    # Somebody else has to wake it.
    subprocess.Popen(["/bin/sh", "-c", f"sleep 7; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _raises(_: Mesh, __: Watchdog) -> None:
    raise ArithmeticError("the loss is no number")


def _leaves(_: Mesh, alarm: Watchdog) -> None:
    alarm.close()
    time.sleep(6)
    os._exit(0)


def _takes_another_op(mesh: Mesh, _: Watchdog) -> None:
    mesh["tp"].all_gather(torch.ones(8))


def _takes_another_size(mesh: Mesh, _: Watchdog) -> None:
    mesh["tp"].all_reduce(torch.ones(4096))


def _takes_another_order(mesh: Mesh, _: Watchdog) -> None:
    mesh.world.all_reduce(torch.ones(4))


def _is_excused(mesh: Mesh, _: Watchdog) -> None:
    with mesh.flight_recorder.expect_delay("reads a checkpoint", most_s=30):
        time.sleep(PATIENCE_S + 1.5)


def _is_well(_: Mesh, __: Watchdog) -> None:
    pass


def stray(mishap: str) -> list[str]:
    """Take part in three checks of the order; return what each said."""
    mesh = Mesh(LAYOUT)
    check, found = CollectiveOrderCheck(mesh), []
    for step in range(3):
        mesh["tp"].all_reduce(torch.ones(8))
        if step == 1 and mesh.rank == 2:
            _write_down(mishap, mesh.flight_recorder)
        mesh["dp"].all_reduce(torch.ones(3))
        try:
            check()
            found.append("")
        except CollectiveOrderError as error:
            found.append(str(error))
    return found


def _write_down(mishap: str, journal: FlightRecorder) -> None:
    """Write down what was not done, as doing it would hang."""
    if mishap == "another op":
        journal.record("dp", "all_gather", torch.ones(3))
    elif mishap == "one too many":
        journal.record("tp", "all_reduce sum", torch.ones(8))
    elif mishap == "a lone message":
        journal.register_group("pp 0>2", (0, 2))
        journal.record("pp 0>2", "message", torch.ones(8))
