"""Processes that tokenize parts side by side; one thread here feeds each of them.

They are programs of their own, told by lines of text what to do, so nothing of the caller (threads,
CUDA, an unguarded main module) is copied into them.
"""

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.train.data.tokenization.tokenization_worker import ShardRejected, TokenizePlan

_MODULE = "meshwright.run.train.data.tokenization.tokenization_worker"


def run_shards(
    folder: Path,
    plan: TokenizePlan,
    parts: Sequence[int],
    workers: int,
    done: Callable[[int], None],
) -> None:
    """Do parts with so many processes; raises the first fault, and no process outlives the call."""
    waiting: SimpleQueue[int] = SimpleQueue()
    for part in parts:
        waiting.put(part)
    faults: list[BaseException] = []
    told = threading.Lock()

    def tell(part: int) -> None:
        with told:
            done(part)

    processes = [_Worker(folder) for _ in range(workers)]
    threads = [
        threading.Thread(target=_feed, args=(worker, plan, waiting, faults, tell), daemon=True)
        for worker in processes
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            # With a timeout, so that an interrupt is heard while waiting.
            while thread.is_alive():
                thread.join(0.2)
                if faults:
                    break
    finally:
        for worker in processes:
            worker.stop()
    if faults:
        raise faults[0]


class _Worker:
    """One process, and what it says on stderr."""

    def __init__(self, folder: Path) -> None:
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in stop
        # The processes are the parallelism: threads of libraries inside them would only compete.
        quiet = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            env={**os.environ, **quiet},
        )

    def do(self, part: int, plan: TokenizePlan) -> None:
        """Have a part done; raises what went wrong."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = b""
        try:
            self._process.stdin.write(b"%d\n" % part)
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            pass  # it has ended; why is said below
        if not answer.endswith(b"\n"):
            raise self._ended(plan.shards[part][0].path)
        kind, _, body = answer.partition(b" ")
        if kind == ShardRejected.__name__.encode():
            raise InputError(msgspec.json.decode(body, type=ShardRejected).problems)

    def _ended(self, path: str) -> InputError:
        code = self._process.wait()
        self._words.seek(0)
        words = self._words.read().decode(errors="replace").strip().splitlines()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        what = f"the process that read it ended with {how}" + (f": {words[-1]}" if words else "")
        fix = "ask again to go on from here; use fewer workers if memory ran out"
        return InputError([Problem(path, what, fix)])

    def stop(self) -> None:
        """End the process, whatever it does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._words):
            try:
                stream.close()
            except BrokenPipeError:
                continue


def _feed(
    worker: _Worker,
    plan: TokenizePlan,
    waiting: "SimpleQueue[int]",
    faults: list[BaseException],
    done: Callable[[int], None],
) -> None:
    """Give a process one part after the other until there is none, or something went wrong."""
    while not faults:
        try:
            part = waiting.get_nowait()
        except Empty:
            return
        try:
            worker.do(part, plan)
            done(part)
        except BaseException as error:  # noqa: BLE001 - raised again by the caller's thread
            faults.append(error)
            return
