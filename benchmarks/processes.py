"""Runs a process and watches what it takes: CPU seconds with its children, and memory."""

import json
import os
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple


class Run(NamedTuple):
    """One process."""

    cpu_s: float
    """Of all stages that it says itself, but imports."""
    whole_s: float
    """With imports and everything else."""
    peak_mb: float
    """Of the process and its children together."""
    said: dict[str, Any]


def run(command: list[str]) -> Run:
    """Run a process that prints `RESULT {...}` and watch what it takes."""
    # What it says beside goes to a file: a pipe that nobody reads would stop it once it is full.
    with tempfile.TemporaryFile("w+") as beside:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=beside, text=True)
        peak = [0.0]
        watcher = threading.Thread(target=_watch, args=(child.pid, peak), daemon=True)
        watcher.start()
        assert child.stdout is not None
        printed = child.stdout.read()
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        watcher.join()
        beside.seek(0)
        faults = beside.read()
    lines = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    if child.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)} failed: {faults[-2000:]}")
    said = json.loads(lines[-1].removeprefix("RESULT "))
    stages = said.get("stages", {})
    counted = sum(took for name, took in stages.items() if name != "import")
    most = max(peak[0], used.ru_maxrss / 1024)
    return Run(counted, used.ru_utime + used.ru_stime, most, said)


def _watch(pid: int, peak: list[float]) -> None:
    """Note the most memory that a process and its children hold, every 20 ms."""
    page_mb = os.sysconf("SC_PAGE_SIZE") / 2**20
    while True:
        pages, waiting = 0, [pid]
        while waiting:
            one = waiting.pop()
            try:
                pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
                tasks = Path(f"/proc/{one}/task").iterdir()
                waiting += [
                    int(child)
                    for task in tasks
                    for child in (task / "children").read_text().split()
                ]
            except (OSError, IndexError):
                continue
        if not pages:
            return
        peak[0] = max(peak[0], pages * page_mb)
        time.sleep(0.02)
