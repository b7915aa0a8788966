"""`ThreadedRolloutEngine`: the engine in its own thread, which samples while the trainer trains."""

import queue
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from meshwright.errors import MeshwrightError
from meshwright.policy.rollout.actions import MemoryPhase
from meshwright.run.posttrain.rl.generation.rollout_backend import RolloutBackend
from meshwright.run.posttrain.rl.generation.rollout_engine import (
    EngineFailedEvent,
    RolloutEvent,
    WeightsUpdatedEvent,
)
from meshwright.run.posttrain.rl.timeline_recorder import RLTimelineRecorder
from meshwright.run.posttrain.rollout.generator import RolloutStream
from meshwright.run.posttrain.rollout.rollout import Rollout, RolloutKey

_SWITCH_S = 0.0005
"""How long a thread keeps the interpreter while another wants it. Python's 5 ms are several steps
of an engine, for which it would wait whenever the trainer's thread prepares kernels."""

_LEAVE_S = 10.0
"""How long a run that ends by a fault waits for the thread."""


class EngineThreadTimeoutError(MeshwrightError):
    """The engine's thread did not end when it was to."""


class _Begin(NamedTuple):
    keys: Sequence[RolloutKey]
    version: int
    known: Mapping[RolloutKey, Rollout]


class _Renew(NamedTuple):
    version: int


class ThreadedRolloutEngine:
    """Takes turns whether anybody waits for them or not."""

    def __init__(
        self, sampling: RolloutBackend, spans: RLTimelineRecorder, stall_timeout_s: float = 300.0
    ) -> None:
        """Start the thread; its last turn may take `stall_timeout_s` when it is to end."""
        self._sampling, self._spans, self._stall_s = sampling, spans, stall_timeout_s
        self._orders: queue.SimpleQueue[_Begin | _Renew | None] = queue.SimpleQueue()
        self._heard: queue.SimpleQueue[RolloutEvent] = queue.SimpleQueue()
        self._turns, self.generating_s = 0, 0.0
        # What was given to the device so far comes before anything of the thread's own stream.
        self._settle()
        self._switched_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    @property
    def step_count(self) -> int:
        """Taken so far; a pool that waits for workers ends stuck ones itself."""
        return self._turns + self._sampling.health_check_count

    def submit(
        self, keys: Sequence[RolloutKey], version: int, known: Mapping[RolloutKey, Rollout]
    ) -> None:
        """Begin rollouts."""
        self._orders.put(_Begin(keys, version, known))

    def update_weights(self, version: int) -> None:
        """Take the trainer's weights."""
        self._orders.put(_Renew(version))

    def enter_memory_phase(self, name: MemoryPhase) -> None:
        """Refuse: both sides hold their memory here."""
        raise AssertionError(f"{name}: an engine beside the trainer shares no memory with it")

    def next_event(self, timeout_s: float) -> RolloutEvent | None:
        """Return what the engine has to say."""
        try:
            return self._heard.get(timeout=timeout_s) if timeout_s else self._heard.get_nowait()
        except queue.Empty:
            return None

    def close(self) -> None:
        """End the thread, with what is under way."""
        self._orders.put(None)
        error = sys.exception()
        # Who ends because of a fault need not hear whether a turn ends well.
        patience_s = self._stall_s if error is None else min(self._stall_s, _LEAVE_S)
        self._thread.join(patience_s)
        sys.setswitchinterval(self._switched_s)
        if not self._thread.is_alive():
            self._settle()
            return
        said = f"the engine's thread has not ended its turn within {patience_s:g} s"
        if error is None:
            raise EngineThreadTimeoutError(
                f"{said}: raise stall_timeout_s where a turn takes as long"
            )
        warnings.warn(said, stacklevel=2)

    def _settle(self) -> None:
        device = self._sampling.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _work(self) -> None:
        device = self._sampling.device
        on_gpu = device.type == "cuda"
        # A stream of its own, or kernels of both sides would wait for each other.
        own = _own_stream(device) if on_gpu else nullcontext()
        stream = RolloutStream(self._sampling.generator)
        try:
            with own:
                while self._obey(stream, on_gpu=on_gpu):
                    began_s = time.perf_counter()
                    with self._spans.record("engines", "generate"):
                        while stream.is_busy and self._orders.empty():
                            for rollout in stream.run_step():
                                self._heard.put(rollout)
                            self._turns += 1
                    self.generating_s += time.perf_counter() - began_s
                stream.close()
        except BaseException as error:  # noqa: BLE001  raised where somebody waits for rollouts
            self._heard.put(EngineFailedEvent(error))

    def _obey(self, stream: RolloutStream, *, on_gpu: bool) -> bool:
        """Carry out an order; wait for one where nothing is under way."""
        order = self._orders.get()
        if order is None:
            return False
        if isinstance(order, _Begin):
            stream.submit(order.keys, order.version, order.known)
            return True
        stream.update_weights(order.version, lambda: self._sampling.load_weights(order.version))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        self._turns += 1
        self._heard.put(WeightsUpdatedEvent(order.version))
        return True


def _own_stream(device: torch.device) -> AbstractContextManager[object]:
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
