"""Takes a sample of the hardware every second and keeps them, in a file of bounded size."""

import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from meshwright.observe.hardware.hardware_sample import HardwareSample
from meshwright.observe.hardware.nvml import NvmlDevices
from meshwright.observe.hardware.process_usage import ProcessUsage, compute_rates, read_usage
from meshwright.observe.watch.watch_folder import WatchFolder

SAMPLE_INTERVAL_S = 1.0
MAX_SAMPLES_IN_MEMORY = 3600
MAX_BYTES = 8 << 20
"""Of a file; there are two, and the older one goes."""


class HardwareLog:
    """Samples so far."""

    def __init__(self, folder: WatchFolder, gpus: NvmlDevices | None) -> None:
        self._path, self._gpus = folder.samples, gpus
        self._before: ProcessUsage | None = None
        self._next_s = 0.0
        self.samples: deque[HardwareSample] = deque(maxlen=MAX_SAMPLES_IN_MEMORY)

    def sample(self, pids: Iterable[int]) -> None:
        """Take a sample where it is time to."""
        now_s = time.time()
        if now_s < self._next_s:
            return
        self._next_s = now_s + SAMPLE_INTERVAL_S
        taken = read_usage(pids, now_s)
        before, self._before = self._before, taken
        if before is None:
            return
        rate = compute_rates(before, taken)
        sample = HardwareSample(
            now_s,
            self._gpus.sample() if self._gpus is not None else (),
            rate.job_cores,
            rate.machine_cores,
            rate.memory_bytes,
        )
        self.samples.append(sample)
        with suppress(OSError):  # a full disk keeps no samples, and stops nothing else
            self._write(sample)

    def select_between(self, first_s: float, last_s: float) -> list[HardwareSample]:
        """Return those of a time."""
        return [one for one in self.samples if first_s <= one.time_s <= last_s]

    def _write(self, sample: HardwareSample) -> None:
        path = self._path
        if path.exists() and path.stat().st_size > MAX_BYTES:
            path.replace(path.with_suffix(".1.jsonl"))
        if not path.exists():
            path.touch(mode=0o600)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(sample) + b"\n")
