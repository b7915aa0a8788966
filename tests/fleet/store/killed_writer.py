"""Puts batches into a store and, where asked, kills itself in the midst of it, as `kill -9` does.

    python killed_writer.py FOLDER POINT NTH

POINT is where: `half` (a file is half written), `unlisted` (files are whole, but in no manifest),
`committing` (the manifest is about to commit), `listed` (all is kept, nobody was told), or `never`.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from meshwright.fleet.sources.source import make_rows
from meshwright.fleet.store import FleetStore, data_file
from meshwright.fleet.store.manifest import Manifest

BATCHES = 12


def batch(number: int) -> list[tuple[str, pa.Table]]:
    """Samples that overlap with those of the batch before, and jobs of which some were known."""
    steps = np.tile(np.arange(number * 60, number * 60 + 80), 8)
    gpu = np.repeat(np.arange(8), 80)
    samples = {
        "cluster": ["east"] * len(steps), "node": [f"n{index // 4}" for index in gpu],
        "gpu": gpu % 4, "time_s": 1.7e9 + 30.0 * steps, "gpu_util": (steps * 7 + gpu) % 101 / 100,
    }  # fmt: skip
    names = [str(name) for name in range(number * 5, number * 5 + 8)]
    jobs = {
        "cluster": ["east"] * 8, "job": names, "attempt": [0] * 8, "submit_s": [1.7e9] * 8,
        "end_s": [1.7e9 + number] * 8, "seen_s": [float(number)] * 8,
    }  # fmt: skip
    return [("gpu_samples", make_rows("gpu_samples", samples)), ("jobs", make_rows("jobs", jobs))]


class Death:
    """Kills this process the `nth` time that it comes to a point."""

    def __init__(self, point: str, nth: int) -> None:
        self.point, self.left = point, nth
        self._write, self._replace = data_file.write_file, Manifest.replace_files

    def reached(self, point: str) -> None:
        if point == self.point:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def write(self, folder: Path, part: Any, rows: pa.Table) -> Any:
        """Write as ever, but die when half of the file is there."""
        made = self._write(folder, part, rows)
        whole = (folder / made.file).read_bytes()
        (folder / made.file).write_bytes(whole[: len(whole) // 2])
        self.reached("half")
        (folder / made.file).write_bytes(whole)
        return made

    def replace(self, manifest: Manifest, *args: Any, **more: Any) -> None:
        """List as ever, but die before it, within it or behind it."""
        self.reached("unlisted")
        manifest._link.set_trace_callback(
            lambda text: self.reached("committing") if text == "COMMIT" else None
        )
        self._replace(manifest, *args, **more)
        manifest._link.set_trace_callback(None)
        self.reached("listed")

    def arrange(self) -> None:
        """Stand in the way of the store."""
        data_file.write_file = self.write

        def replace(manifest: Manifest, *args: Any, **more: Any) -> None:
            self.replace(manifest, *args, **more)

        Manifest.replace_files = replace  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    folder, point, nth = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if point != "never":
        Death(point, nth).arrange()
    with FleetStore(folder, create=True) as store:
        first = int(store.get_cursor("batches") or 0)
        for number in range(first, BATCHES):
            for table, rows in batch(number):
                store.put(table, rows)
            store.set_cursor("batches", str(number + 1))
            print(number, flush=True)
