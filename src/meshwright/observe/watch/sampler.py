"""Takes a sample of the hardware every second and keeps them, in a file of bounded size."""

import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from meshwright.observe.watch.folder import Folder
from meshwright.observe.watch.gpus import Gpus
from meshwright.observe.watch.hardware import Sample
from meshwright.observe.watch.host import Taken, look, rates

EVERY_S = 1.0
IN_MEMORY = 3600
MOST_BYTES = 8 << 20
"""Of a file; there are two, and the older one goes."""


class Sampler:
    """Samples so far."""

    def __init__(self, folder: Folder, gpus: Gpus | None) -> None:
        self._path, self._gpus = folder.samples, gpus
        self._before: Taken | None = None
        self._next_s = 0.0
        self.samples: deque[Sample] = deque(maxlen=IN_MEMORY)

    def tick(self, pids: Iterable[int]) -> None:
        """Take a sample where it is time to."""
        now_s = time.time()
        if now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        taken = look(pids, now_s)
        before, self._before = self._before, taken
        if before is None:
            return
        rate = rates(before, taken)
        sample = Sample(
            now_s,
            self._gpus.sample() if self._gpus is not None else (),
            rate.job_cores,
            rate.machine_cores,
            rate.memory_bytes,
        )
        self.samples.append(sample)
        with suppress(OSError):  # a full disk keeps no samples, and stops nothing else
            self._write(sample)

    def between(self, first_s: float, last_s: float) -> list[Sample]:
        """Return those of a time."""
        return [one for one in self.samples if first_s <= one.time_s <= last_s]

    def _write(self, sample: Sample) -> None:
        path = self._path
        if path.exists() and path.stat().st_size > MOST_BYTES:
            path.replace(path.with_suffix(".1.jsonl"))
        if not path.exists():
            path.touch(mode=0o600)
        with path.open("ab") as file:
            file.write(msgspec.json.encode(sample) + b"\n")
