"""What is done to a rank before its run begins; each is called with the rank's number."""

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.policy.rollout import Train
from meshwright.run.posttrain.loop.driving import Driver
from meshwright.run.posttrain.loop.policy_step import Learned
from meshwright.run.posttrain.loop.ranks import offering
from meshwright.run.posttrain.loop.ranks.state import RankState
from meshwright.run.posttrain.loop.sampling import VerifierFailing
from meshwright.run.posttrain.rollouts.generate import Group
from meshwright.run.posttrain.workers.fleet import Fleet


def dies_in_a_step(rank: int, *, which: int = 1, when: int = 2) -> None:
    """Kill one rank when a step begins, counted from 0."""
    train = RankState.step

    def killed(self: RankState, step: int, groups: Sequence[Group]) -> Learned:
        if step == when and rank == which:
            os.kill(os.getpid(), signal.SIGKILL)
        return train(self, step, groups)

    RankState.step = killed  # type: ignore[method-assign]


def tells_its_process(rank: int, *, path: Path, then: Callable[[int], object] | None) -> None:
    """Write down the first rank's process."""
    if rank == 0:
        path.write_text(str(os.getpid()))
    if then is not None:
        then(rank)


def first_dies(rank: int) -> None:
    dies_in_a_step(rank, which=0)


def is_far(rank: int) -> None:
    """Let other ranks than the first be on other machines."""
    if rank:
        offering.sees = lambda folder: folder is None


def draws_long(rank: int) -> None:
    """Let the first rank take longer over rollouts than ranks wait for one another."""
    train = Driver._train

    def slow(self: Driver, doing: Train) -> None:
        time.sleep(2.5)
        train(self, doing)

    if rank == 0:
        Driver._train = slow  # type: ignore[method-assign]


def wants_the_port(rank: int) -> None:
    """Let somebody try to listen where the ranks are about to meet."""
    if rank:
        with suppress(OSError):
            taken = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
            taken.detach()


def verifiers_fail(rank: int) -> None:
    """Let the first rank end with an error between two orders."""

    def fails(self: Driver, doing: Train) -> None:
        raise VerifierFailing(f"of step {doing.step}, with {self}")

    if rank == 0:
        Driver._train = fails  # type: ignore[method-assign]


def worker_dies(rank: int) -> None:
    """Kill a worker once, while it draws."""
    ask, killed = Fleet._ask, False

    def asks(self: Fleet, worker: Any, tickets: Any) -> None:
        nonlocal killed
        ask(self, worker, tickets)
        if not killed and self.version > 1 and worker.link is not None:
            killed = True
            worker.link.end()

    if rank == 0:
        Fleet._ask = asks  # type: ignore[method-assign]
