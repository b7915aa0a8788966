"""`RayWorkerCluster`: joins or starts a Ray cluster and starts rollout workers on it."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.local_ray import start_local_ray
from meshwright.policy.rollout import get_engine_memory_fraction
from meshwright.run.posttrain.workers.deadline import DeadlineExceededError, call_with_deadline
from meshwright.run.posttrain.workers.ray_workers import (
    RayWorkerActor,
    RayWorkerLink,
    _first_line,
    _ObjectStoreVersions,
)
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.run.serve.worker.protocol import (
    StartEngine,
)

if TYPE_CHECKING:
    from types import ModuleType


_LEAVE_S = 30.0
"""How long Ray may take to leave a cluster, or to end one that was started here."""

LOCAL_CLUSTER = "local"
"""What stands for a cluster that is started here, in place of an address."""


class RayWorkerCluster:
    """A Ray cluster that workers are hired from."""

    def __init__(
        self,
        workers: WorkerConfig,
        starts: Sequence[StartEngine],
        patience_s: float = 150.0,
        start_s: float = 300.0,
    ) -> None:
        """Join a cluster, or start one here; messages and starts wait for so long at most."""
        self._patience_s, self._start_s = patience_s, start_s
        self._ray, self._starts = _ray(), [_within_ray(each) for each in starts]
        self._begun = not self._ray.is_initialized()
        if self._begun:
            self._join(workers.ray_address)
        self._shelf = _ObjectStoreVersions(self._ray, start_s)
        self._tp = workers.tensor_parallel_size

    def start_worker(self, number: int) -> RayWorkerLink:
        """Start the worker of a number somewhere."""
        start = self._starts[number]
        gpus = self._tp if start.config.device.startswith("cuda") else 0
        kept = self._ray.remote(RayWorkerActor).options(
            num_cpus=1, num_gpus=gpus, max_concurrency=8, scheduling_strategy="SPREAD"
        )
        waits = {"patience_s": self._patience_s, "start_s": self._start_s}
        return RayWorkerLink(self._ray, kept.remote(), start, self._shelf, **waits)

    def _join(self, address: str) -> None:
        quiet = {"log_to_driver": False, "logging_level": "warning"}
        if address == LOCAL_CLUSTER:
            # The processes of a cluster end with the thread that started them, and these starts
            # have deadlines of Ray's.
            start_local_ray(self._ray, **quiet)
            return

        def join() -> None:
            self._ray.init(address=address, **quiet)

        fix = "check the address, and that the cluster runs there, or raise stall_timeout_s"
        try:
            # Ray itself asks an address where nobody answers for ever.
            call_with_deadline(join, self._start_s, "Ray's cluster")
        except DeadlineExceededError as error:
            what = f"no Ray cluster has answered at {address} within {self._start_s:g} s"
            raise InputError([Problem("workers.ray_address", what, fix)]) from error
        except ConnectionError as error:
            raise InputError([Problem("workers.ray_address", _first_line(error), fix)]) from error

    def close(self) -> None:
        """Leave the cluster, where this joined it."""
        if self._begun:
            try:
                call_with_deadline(self._ray.shutdown, _LEAVE_S, "Ray's shutdown")
            except DeadlineExceededError:
                what = f"Ray has not left its cluster within {_LEAVE_S:g} s, and is left behind"
                warnings.warn(what, stacklevel=2)


def _within_ray(start: StartEngine) -> StartEngine:
    """Return a start for a machine on which Ray has chosen the GPU, which is then the worker's."""
    if not start.config.device.startswith("cuda"):
        return start
    alone = get_engine_memory_fraction(beside=False, by_turns=False)
    settings = msgspec.structs.replace(start.config, device="cuda", gpu_memory_utilization=alone)
    return msgspec.structs.replace(start, config=settings)


def _ray() -> "ModuleType":
    try:
        import ray
    except ModuleNotFoundError:
        what = "workers on many machines need Ray, which is not installed"
        raise MissingDependency(what, "pip install 'meshwright[ray]'") from None
    module: ModuleType = ray
    return module
