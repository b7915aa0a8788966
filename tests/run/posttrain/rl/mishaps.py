"""What is done to a rank before its run begins; each is called with the rank's number."""

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.policy.rollout import TrainAction
from meshwright.run.posttrain.rl.distributed import weight_sender
from meshwright.run.posttrain.rl.distributed.rank_state import RankState
from meshwright.run.posttrain.rl.driver import RLDriver
from meshwright.run.posttrain.rl.generation.rollout_backend import VerifierFailureError
from meshwright.run.posttrain.rl.trainer.policy_step import PolicyStepResult
from meshwright.run.posttrain.rollout.generator import RolloutGroup
from meshwright.run.posttrain.workers.worker_pool import RolloutWorkerPool


def dies_in_a_step(rank: int, *, which: int = 1, when: int = 2) -> None:
    """Kill one rank when a step begins, counted from 0."""
    train = RankState.step

    def killed(self: RankState, step: int, groups: Sequence[RolloutGroup]) -> PolicyStepResult:
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
        weight_sender.shares_folder = lambda folder: folder is None


def draws_long(rank: int) -> None:
    """Let the first rank take longer over rollouts than ranks wait for one another."""
    train = RLDriver._train

    def slow(self: RLDriver, doing: TrainAction) -> None:
        time.sleep(2.5)
        train(self, doing)

    if rank == 0:
        RLDriver._train = slow  # type: ignore[method-assign]


def wants_the_port(rank: int) -> None:
    """Let somebody try to listen where the ranks are about to meet."""
    if rank:
        with suppress(OSError):
            taken = socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"])))
            taken.detach()


def verifiers_fail(rank: int) -> None:
    """Let the first rank end with an error between two orders."""

    def fails(self: RLDriver, doing: TrainAction) -> None:
        raise VerifierFailureError(f"of step {doing.step}, with {self}")

    if rank == 0:
        RLDriver._train = fails  # type: ignore[method-assign]


def worker_dies(rank: int) -> None:
    """Kill a worker once, while it draws."""
    ask, killed = RolloutWorkerPool._ask, False

    def asks(self: RolloutWorkerPool, worker: Any, tickets: Any) -> None:
        nonlocal killed
        ask(self, worker, tickets)
        if not killed and self.weights_version > 1 and worker.link is not None:
            killed = True
            worker.link.stop()

    if rank == 0:
        RolloutWorkerPool._ask = asks  # type: ignore[method-assign]
