"""Whether a server keeps anything of the requests it has answered.

`mw serve` with a tiny random model is asked by many clients at a time, as fast as the machine
allows: whole answers, streams, errors, and clients that go away. After every round all of them are
gone, and what the server's processes hold then is read from outside: memory, open files, threads,
blocks of keys and values, requests. Caches fill up in the first half of the rounds; the growth of
memory is the slope of a straight line through the second.
"""

import asyncio
import os
import re
import shlex
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import NamedTuple

from benchmarks.result import figure
from benchmarks.soak_clients import asked

NAME = "serve_soak"
QUESTION = "Does a server keep anything of 100,000 requests that it has answered?"
ROUNDS = 50
CLIENTS = 64
SERVER = "--port 0 --device cpu --max-model-len 64 --max-num-seqs 64 --max-num-batched-tokens 512 \
--num-gpu-blocks-override 1024 --no-access-log"
SETUPS = {
    "one engine": ("", 100_000, "< 256"),
    "two engines": ("--replicas 2", 20_000, ""),
    "prompts handed over": ("--prefill-replicas 1 --decode-replicas 1", 20_000, ""),
}
"""Flags, requests, and how many bytes a request may leave. Caches of two engines fill up later."""
ALLOCATOR = "jemalloc_bg_thd"
"""A thread that comes and goes with the memory's allocator, where that is jemalloc."""
CLOSE_WAIT = "08"
"""Of `include/net/tcp_states.h` of Linux."""
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
OPEN = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


class Held(NamedTuple):
    """What a server holds while nobody asks."""

    requests: int
    """That were answered until then."""
    memory: int
    """Resident bytes of all its processes."""
    files: int
    threads: int
    open: tuple[float, ...]
    """Requests that have a place or wait, and the share of the blocks that they hold."""


class Soaked(NamedTuple):
    """What was seen of one server."""

    samples: list[Held]
    wrong: Counter[str]
    took_s: float

    @property
    def settled(self) -> list[Held]:
        """The samples of the second half."""
        return self.samples[len(self.samples) // 2 :]

    @property
    def growth(self) -> float:
        """Bytes for each request."""
        line = statistics.linear_regression(
            [held.requests for held in self.settled], [held.memory for held in self.settled]
        )
        return line.slope

    def more(self, what: str) -> int:
        """Return how much more of something there is at the end than there was half-way.

        Each is the least of some rounds: a connection that closes, or a thread that ends, may
        still be seen in one of them.
        """
        found = [getattr(held, what) for held in self.settled]
        part = max(len(found) // 3, 1)
        return int(min(found[-part:]) - min(found[:part]))


def soak(model: Path, flags: str, requests: int, rounds: int = ROUNDS) -> Soaked:
    """Ask a server so many times, in rounds."""
    samples, wrong = [], Counter[str]()
    with served(model, flags) as (pid, url):
        begun = time.perf_counter()
        for number in range(rounds):
            count = requests // rounds
            wrong += asyncio.run(asked(url, number * count, count, CLIENTS))
            samples.append(_held(pid, url, (number + 1) * count))
        took_s = time.perf_counter() - begun
    return Soaked(samples, wrong, took_s)


@contextmanager
def served(model: Path, flags: str) -> Iterator[tuple[int, str]]:
    """Start a server; hand out its process and its address."""
    command = [sys.executable, "-m", "meshwright", "serve", str(model)]
    command += shlex.split(f"{SERVER} {flags}")
    # A product of a tiny model is done before other threads have heard of it.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with TemporaryFile("w+") as said:
        child = subprocess.Popen(command, stderr=said, stdout=said, env=environment)
        try:
            yield child.pid, _address(child, said.fileno())
        finally:
            child.terminate()
            child.wait(120)


def _address(child: "subprocess.Popen[bytes]", said: int) -> str:
    """Wait until a server says where it listens."""
    while True:
        text = os.pread(said, 1 << 16, 0).decode()
        if found := re.search(r" at (http://\S+)/v1", text):
            return found[1]
        if child.poll() is not None:
            raise RuntimeError(f"the server did not start: {text[-2000:]}")
        time.sleep(0.1)


def _held(pid: int, url: str, requests: int) -> Held:
    """Read what a server holds, once nobody is asking; after half a minute, whatever it is."""
    for _ in range(120):
        opened = _opened(url)
        if not any(opened):
            break
        time.sleep(0.25)
    memory = threads = 0
    family = _family(pid)
    files = open_files(family)
    for process in family:
        status = Path(f"/proc/{process}/status").read_text()
        facts = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        memory += int(facts["VmRSS"].split()[0]) * 1024
        threads += sum(_named(thread) != ALLOCATOR for thread in _threads(process))
    return Held(requests, memory, files, threads, opened)


def open_files(processes: Iterable[int], wait_s: float = 5.0) -> int:
    """Count open files, once connections that their clients left are closed, or after a while.

    The last of these is the one that has just asked for figures: a busy server takes some time to
    see that it was left, and holds nothing by that.
    """
    until_s = time.monotonic() + wait_s
    while True:
        left = _left()  # read first: a socket that closes between the two reads is in neither
        found = [file for process in processes for file in _files(process)]
        if not left.intersection(found) or time.monotonic() > until_s:
            return len(found)
        time.sleep(0.02)


def _files(process: int) -> Iterator[str]:
    for file in Path(f"/proc/{process}/fd").iterdir():
        with suppress(OSError):  # it may be closed meanwhile
            yield str(file.readlink())


def _left() -> set[str]:
    """Return the sockets whose other ends have gone, as `/proc` names them."""
    rows = (row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return {f"socket:[{row[9]}]" for row in rows if row[3] == CLOSE_WAIT}


def _opened(url: str) -> tuple[float, ...]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as got:
        lines = got.read().decode().splitlines()
    told = dict(line.split("{", 1) for line in lines if line.startswith(OPEN))
    under_way = next(line for line in lines if line.startswith("meshwright:requests_in_progress{"))
    # The request that asks this is one of those under way.
    return *(float(told[name].split()[-1]) for name in OPEN), float(under_way.split()[-1]) - 1


def _family(pid: int) -> list[int]:
    """Return a process and all that it started."""
    found, waiting = [], [pid]
    while waiting:
        one = waiting.pop()
        found.append(one)
        for thread in _threads(one):
            with suppress(OSError):  # it may have ended meanwhile
                waiting += map(int, (thread / "children").read_text().split())
    return found


def _threads(process: int) -> list[Path]:
    return list(Path(f"/proc/{process}/task").iterdir())


def _named(thread: Path) -> str:
    try:
        return (thread / "comm").read_text().strip()
    except OSError:
        return ALLOCATOR


def tiny_model() -> Path:
    """Return a folder with a tiny model that can be served."""
    from tests.run.serve.served_folders import folder

    path = folder("")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


def measure(quick: bool) -> dict[str, object]:
    """Ask, and return what stayed."""
    model, figures, wrong = tiny_model(), [], Counter[str]()
    for name, (flags, requests, allowed) in SETUPS.items():
        seen = soak(model, flags, 680, 10) if quick else soak(model, flags, requests)
        wrong += seen.wrong
        last = seen.settled[-1]
        figures += [
            figure(f"{name}: requests", last.requests, ""),
            figure(f"{name}: requests a second", last.requests / seen.took_s, "requests/s"),
            figure(f"{name}: wrong answers", seen.wrong.total(), "", "<= 0"),
            figure(f"{name}: memory at the end", last.memory / 2**20, "MiB"),
            figure(f"{name}: growth of memory", seen.growth, "bytes a request", allowed),
            figure(f"{name}: further open files", seen.more("files"), "", "<= 0"),
            figure(f"{name}: further threads", seen.more("threads"), "", "<= 2"),
            figure(
                f"{name}: requests and blocks still held",
                max(sum(held.open) for held in seen.samples), "", "<= 0",
            ),
        ]  # fmt: skip
    return {
        "figures": figures,
        "notes": f"{CLIENTS} clients on the machine of the server, over loopback. Of 17 requests "
        "10 are answered to the end, half of them as streams, 4 are left by their clients on the "
        "way, 2 are wrong and one asks for a vector; each has a user, a prompt and a name of its "
        "own. After every round of a fiftieth the clients go, and what the processes hold is read "
        "from outside. Caches fill up in the first half; growth is the slope of a line through the "
        "second. Part of it is room that the allocator keeps between what is used, not what a "
        "request left; the rate is that of whatever else the machine does, too. A pool of threads "
        f"has one more or less of them at times. Wrong: {dict(wrong) or 'none'}.",
    }
