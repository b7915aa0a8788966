"""Starts real servers of Prometheus's HTTP API on loopback, filled with a fleet's telemetry."""

import contextlib
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

Samples = Mapping[str, list[tuple[float, float]]]
"""Times and values by the series as its exporter writes it: `name{label="value"}`."""


def free_port() -> int:
    """Find a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def answers(url: str, within_s: float = 30.0) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + within_s
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        if time.monotonic() > end:
            raise TimeoutError(f"{url} does not answer")
        time.sleep(0.1)


class Server:
    """A process that can be ended and started again at the same address."""

    def __init__(self, command: list[str], url: str, ready: str, log: Path) -> None:
        self.url, self._command, self._ready, self._log = url, command, ready, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.begin()
        answers(self.url + self._ready)

    def begin(self) -> None:
        """Start it without waiting."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        """End it without warning."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextlib.contextmanager
def prometheus(folder: Path, samples: Samples) -> Iterator[Server]:
    """Run Debian's Prometheus over samples of the past."""
    program, tool = shutil.which("prometheus"), shutil.which("promtool")
    if program is None or tool is None:
        raise FileNotFoundError("prometheus")
    text, data, port = folder / "samples.om", folder / "data", free_port()
    lines = [f"{series} {value!r} {time_s:.3f}" for series, found in sorted(samples.items())
             for time_s, value in found]  # fmt: skip
    text.write_text("\n".join([*lines, "# EOF\n"]))
    subprocess.run(
        [tool, "tsdb", "create-blocks-from", "openmetrics", str(text), str(data)],
        check=True, capture_output=True,
    )  # fmt: skip
    (folder / "p.yml").write_text("global: {scrape_interval: 1h}\n")
    command = [program, f"--config.file={folder / 'p.yml'}", f"--storage.tsdb.path={data}",
               "--storage.tsdb.retention.time=100y",
               f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
    server = Server(command, f"http://127.0.0.1:{port}", "/-/ready", folder / "log")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def victoria_metrics(folder: Path, samples: Samples) -> Iterator[Server]:
    """Run Debian's VictoriaMetrics over samples of the past."""
    program = shutil.which("victoria-metrics")
    if program is None:
        raise FileNotFoundError("victoria-metrics")
    port = free_port()
    command = [program, f"-storageDataPath={folder / 'vm'}", f"-httpListenAddr=127.0.0.1:{port}",
               "-retentionPeriod=100y", "-memory.allowedPercent=10"]  # fmt: skip
    server = Server(command, f"http://127.0.0.1:{port}", "/health", folder / "vm.log")
    try:
        server.start()
        lines = [f"{series} {value!r} {round(1000 * time_s)}" for series, found in samples.items()
                 for time_s, value in found]  # fmt: skip
        _post(server.url + "/api/v1/import/prometheus", "\n".join(lines).encode())
        _post(server.url + "/internal/force_flush", b"")
        yield server
    finally:
        server.kill()


def _post(url: str, body: bytes) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=60) as reply:
        reply.read()


@contextlib.contextmanager
def scraping(folder: Path, target: int) -> Iterator[Server]:
    """Run Debian's Prometheus, which scrapes a port of this machine every second."""
    program = shutil.which("prometheus")
    if program is None:
        raise FileNotFoundError("prometheus")
    port = free_port()
    (folder / "p.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        "scrape_configs:\n"
        f"- {{job_name: mw, static_configs: [{{targets: ['127.0.0.1:{target}']}}]}}\n"
    )
    command = [program, f"--config.file={folder / 'p.yml'}", f"--storage.tsdb.path={folder / 'd'}",
               f"--web.listen-address=127.0.0.1:{port}"]  # fmt: skip
    server = Server(command, f"http://127.0.0.1:{port}", "/-/ready", folder / "scrape.log")
    try:
        server.start()
        yield server
    finally:
        server.kill()
