"""The page that Prometheus scrapes, made by its own client."""

import socket
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from meshwright.errors import InputError, MissingPart, Problem
from meshwright.observe.bench.nvml import library
from meshwright.observe.fleet.exporter.gpus import gpu_figures
from meshwright.observe.fleet.exporter.runs import Followed, Runs

PORT = 9421


def _client(part: str = "") -> Any:
    try:
        return import_module("prometheus_client" + part)
    except ImportError:
        hint = 'pip install "meshwright[fleet]"'
        raise MissingPart("exporting needs prometheus-client", hint) from None


class Collector:
    """Asks GPUs and jobs each time the page is asked for."""

    def __init__(self, runs: Sequence[Followed], hostname: str = "", nvml: Any = None) -> None:
        self._core = _client(".core")
        self._runs, self._hostname = Runs(runs), hostname or socket.gethostname()
        self._nvml = library() if nvml is None else nvml

    @property
    def has_gpus(self) -> bool:
        """Whether this machine has GPUs that can be asked."""
        return self._nvml is not None

    def collect(self) -> Iterator[Any]:
        """Give families of metrics, as the client wants them."""
        families: dict[str, Any] = {}
        gpus = () if self._nvml is None else gpu_figures(self._nvml, self._hostname)
        for measured in gpus:
            self._add(families, self._core.GaugeMetricFamily, measured)
        for told in self._runs.figures():
            kind = self._core.CounterMetricFamily if told.counter else self._core.GaugeMetricFamily
            host = told._replace(labels=told.labels | {"hostname": self._hostname})
            self._add(families, kind, host)
        yield from families.values()

    @staticmethod
    def _add(families: dict[str, Any], kind: Any, one: Any) -> None:
        if one.name not in families:
            families[one.name] = kind(one.name, one.help, labels=list(one.labels))
        families[one.name].add_metric(list(one.labels.values()), one.value)


class Page:
    """A page that is served until it is closed."""

    def __init__(self, server: Any, thread: Any) -> None:
        self._server, self._thread = server, thread

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def page_text(collector: Collector) -> str:
    """Return the page as text, for the textfile collector of node-exporter."""
    client = _client()
    registry = client.CollectorRegistry()
    registry.register(collector)
    return str(client.generate_latest(registry).decode())


def serve_page(collector: Collector, host: str = "127.0.0.1", port: int = PORT) -> Page:
    """Serve the page; only to this machine, unless another address is named."""
    client = _client()
    registry = client.CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = client.start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        what = f"{host}:{port} cannot be listened on: {error.strerror or error}"
        raise InputError([Problem("--port", what, "use another port, or 0 for any")]) from None
    return Page(server, thread)
