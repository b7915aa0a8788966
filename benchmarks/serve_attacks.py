"""Whether one hostile request holds up a server and the streams that it serves.

`mw serve` with a tiny random model and the tokenizer of a real one answers 100 streams. One attack
after another is sent beside them, each by a client of its own, while another process asks for
`/health` all the time. Each attack is compared with the seconds before it, on the same streams.
"""

import argparse
import asyncio
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from benchmarks.attack_bodies import TEMPLATE, Attack, attacks
from benchmarks.result import figure
from benchmarks.serve_soak import served

NAME = "serve_attacks"
QUESTION = "Does any single request hold up a server's health and its streams?"
STREAMS = 100
MAX_MODEL_LEN = 8192
SERVER = f"--port 0 --device cpu --max-model-len {MAX_MODEL_LEN} --max-num-seqs 160 \
--max-num-batched-tokens 2048 --num-gpu-blocks-override 24000 --no-access-log"
ROUNDS = 1
QUIET_S, SETTLE_S = 1.5, 0.4
ATTACK_TIMEOUT_S = 35.0
STREAM_TOKENS = 1500
PROBE = r"""
import http.client, json, sys, time
host, port = sys.argv[1], int(sys.argv[2])
line = http.client.HTTPConnection(host, port, timeout=120)
while True:
    begun = time.monotonic()
    line.request("GET", "/health")
    line.getresponse().read()
    took = time.monotonic() - begun
    print(begun, took, flush=True)
    time.sleep(max(0.01 - took, 0.002))
"""
SEND = r"""
import socket, sys, time
host, port, file, wait_s = sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4])
data = open(file, "rb").read()
line = socket.create_connection((host, port), timeout=wait_s)
print("ready", flush=True)
sys.stdin.readline()
begun, status = time.monotonic(), 0
try:
    try:
        line.sendall(data)
    except OSError:
        pass  # it may be answered before all is sent
    while part := line.recv(1 << 20):
        if not status:
            status = int(part.split(b" ", 2)[1])
except OSError:
    pass
print(begun, time.monotonic(), status, flush=True)
"""


class Window(NamedTuple):
    """What was seen from outside within some time."""

    health_s: tuple[float, ...]
    gaps_s: tuple[float, ...]
    """Times between two tokens of a stream, of all streams."""

    @property
    def worst_health_s(self) -> float:
        """The longest that a question for health took."""
        return max(self.health_s, default=0.0)

    @property
    def gap_ratio(self) -> float:
        """The longest gap of a stream, in gaps of the usual length."""
        return max(self.gaps_s) / statistics.median(self.gaps_s) if self.gaps_s else 0.0


class Struck(NamedTuple):
    """One attack: what it was answered with, and what was seen before and during it."""

    attack: str
    status: int
    took_s: float
    before: Window
    during: Window


class Streams:
    """Clients that read answers, one after another, and note when tokens come."""

    def __init__(self, url: str, count: int) -> None:
        place = urlsplit(url)
        self._host, self._port = str(place.hostname), place.port
        self._count = count
        self._numbers = itertools.count()
        self.arrivals: list[list[float]] = []
        """When tokens came, a list for each answer."""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> "Streams":
        self._tasks = [asyncio.create_task(self._read()) for _ in range(self._count)]
        while sum(bool(times) for times in self.arrivals) < self._count:
            await asyncio.sleep(0.1)
            for task in self._tasks:
                if task.done():
                    task.result()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self) -> None:
        while True:
            number = next(self._numbers)
            # The first answers end at different times, so that later ones begin one by one.
            tokens = STREAM_TOKENS // 2 + (number * 37) % STREAM_TOKENS
            fields = {"prompt": f"stream {number}", "max_tokens": tokens, "temperature": 0}
            body = json.dumps({**fields, "stream": True, "ignore_eos": True}).encode()
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            reader, writer = await asyncio.open_connection(self._host, self._port)
            times: list[float] = []
            self.arrivals.append(times)
            writer.write(head.encode() + body)
            try:
                while data := await reader.read(1 << 16):
                    if b"data: " in data:
                        times.append(time.monotonic())
            finally:
                writer.close()

    def gaps(self, begin: float, end: float) -> tuple[float, ...]:
        """Return the times between tokens, of gaps that reach into some time."""
        return tuple(
            after - before
            for times in self.arrivals
            for before, after in itertools.pairwise(times)
            if after > begin and before < end
        )

    def forget(self, until: float) -> None:
        """Drop what came before some time."""
        for times in self.arrivals:
            kept = [at for at in times if at > until]
            times[:] = kept
        self.arrivals = [times for times in self.arrivals if times]


class Probe:
    """A process that asks for health, again and again."""

    def __init__(self, url: str) -> None:
        place = urlsplit(url)
        command = [sys.executable, "-c", PROBE, str(place.hostname), str(place.port)]
        self._output = tempfile.NamedTemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(command, stdout=self._output)

    def took(self, begin: float, end: float) -> tuple[float, ...]:
        """Return how long the questions took that were under way within some time."""
        rows = [line.split() for line in Path(self._output.name).read_text().splitlines()]
        found = [(float(row[0]), float(row[1])) for row in rows if len(row) == 2]
        return tuple(took for at, took in found if at < end and at + took > begin)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._output.close()


async def strike(url: str, attack: Attack, streams: Streams, probe: Probe) -> Struck:
    """Send one attack beside the streams; return what was seen."""
    place = urlsplit(url)
    with tempfile.NamedTemporaryFile() as file:
        for piece in attack.pieces():
            file.write(piece)
        file.flush()
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SEND, str(place.hostname), str(place.port), file.name,
            str(ATTACK_TIMEOUT_S), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert sender.stdin is not None
        assert sender.stdout is not None
        await sender.stdout.readline()
        await asyncio.sleep(SETTLE_S)
        quiet = time.monotonic()
        streams.forget(quiet - 5 * QUIET_S)
        await asyncio.sleep(QUIET_S)
        sender.stdin.write(b"go\n")
        await sender.stdin.drain()
        begun, ended, status = (await sender.stdout.readline()).split()
        await asyncio.sleep(SETTLE_S)
        begin, end = float(begun), max(float(ended), float(begun) + QUIET_S)
        await asyncio.sleep(max(0.0, end + 0.2 - time.monotonic()))
        await sender.wait()
    return Struck(
        attack.name,
        int(status),
        float(ended) - begin,
        Window(probe.took(quiet, begin), streams.gaps(quiet, begin)),
        Window(probe.took(begin, end), streams.gaps(begin, end)),
    )


async def strike_all(url: str, chosen: Sequence[Attack], count: int = STREAMS) -> list[Struck]:
    """Send attacks one after another beside so many streams."""
    probe = Probe(url)
    try:
        async with Streams(url, count) as streams:
            await asyncio.sleep(QUIET_S)
            found = []
            for attack in chosen:
                found.append(await strike(url, attack, streams, probe))
                print(_line(found[-1]), file=sys.stderr, flush=True)
            return found
    finally:
        probe.close()


@contextmanager
def attacked_model() -> Iterator[Path]:
    """Yield a folder with a tiny model, a real tokenizer and a hostile chat template."""
    from benchmarks.attack_model import write_model

    folder = Path(tempfile.mkdtemp(prefix="mw-attacked-"))
    try:
        write_model(folder, MAX_MODEL_LEN)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_attacks(wanted: str = "", count: int = STREAMS, limit: int | None = None) -> list[Struck]:
    """Serve, and send the attacks whose names have a text in them."""
    with attacked_model() as folder, served(folder, SERVER) as (_, url):
        from benchmarks.attack_model import VOCAB_SIZE

        every = attacks(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN)
        chosen = [attack for attack in every if wanted in attack.name][:limit]
        return asyncio.run(strike_all(url, chosen, count))


def _line(struck: Struck) -> str:
    before, during = struck.before, struck.during
    return (
        f"{struck.attack:<36} {struck.status:>4} {struck.took_s:6.2f} s  health"
        f" {before.worst_health_s * 1e3:6.0f} -> {during.worst_health_s * 1e3:6.0f} ms  gaps"
        f" {before.gap_ratio:5.1f} -> {during.gap_ratio:5.1f} of"
        f" {statistics.median(during.gaps_s or (0.0,)) * 1e3:.0f} ms"
    )


def measure(quick: bool) -> dict[str, object]:
    """Attack, and return what was held up."""
    rounds = [run_attacks(limit=4 if quick else None) for _ in range(ROUNDS)]
    by_name: dict[str, list[Struck]] = {}
    for struck in itertools.chain.from_iterable(rounds):
        by_name.setdefault(struck.attack, []).append(struck)
    health = {
        name: statistics.median(struck.during.worst_health_s for struck in found)
        for name, found in by_name.items()
    }
    quiet = [struck.before.worst_health_s for found in by_name.values() for struck in found]
    ratios = {
        name: statistics.median(struck.during.gap_ratio for struck in found)
        for name, found in by_name.items()
    }
    quiet_ratios = [struck.before.gap_ratio for found in by_name.values() for struck in found]
    every = attacks(vocab_size=1024, max_model_len=64)
    right = {attack.name: attack.statuses for attack in every}
    wrong = [
        f"{struck.attack}: {struck.status}"
        for found in by_name.values()
        for struck in found
        if struck.status not in right[struck.attack]
    ]
    worst, rough = max(health, key=lambda name: health[name]), max(ratios, key=lambda n: ratios[n])
    return {
        "figures": [
            figure("attacks", len(by_name), ""),
            figure("streams beside them", STREAMS, ""),
            figure("worst health delay under an attack", health[worst] * 1e3, "ms", "<= 100"),
            figure("median of the worst health delays under attack",
                   statistics.median(health.values()) * 1e3, "ms"),
            figure("worst health delay in quiet times", max(quiet) * 1e3, "ms"),
            figure("median of the worst health delays in quiet times",
                   statistics.median(quiet) * 1e3, "ms"),
            figure("longest gap of a stream under an attack", ratios[rough], "median gaps", "<= 3"),
            figure("median of the longest gaps under attack",
                   statistics.median(ratios.values()), "median gaps"),
            figure("median of the longest gaps in quiet times",
                   statistics.median(quiet_ratios), "median gaps"),
            figure("answers with another status than wanted", len(wrong), "", "<= 0"),
        ],
        "notes": f"Each attack is one request of up to 16 MiB beside {STREAMS} streams of a tiny "
        "model whose tokenizer is that of SmolLM2, on the machine of the server, which other work "
        "shared; figures of an attack are medians of its rounds' worst. Quiet times are the "
        f"{QUIET_S:g} s before each attack. Worst for health: {worst}; for streams: {rough}. By "
        "attack, "
        "ms of health: "
        + ", ".join(f"{name} {took * 1e3:.0f}" for name, took in sorted(health.items()))
        + f". Wrong: {wrong or 'none'}.",
    }  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=QUESTION)
    parser.add_argument("--only", default="", help="attacks whose names have this text in them")
    parser.add_argument("--streams", type=int, default=STREAMS)
    arguments = parser.parse_args()
    run_attacks(arguments.only, arguments.streams)
