"""The page that Prometheus scrapes, made by its own client."""

import socket
import threading
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.fleet.exporter.job_metrics import JobFolder, JobMetricReader
from meshwright.fleet.exporter.metric_sample import MetricSample
from meshwright.fleet.exporter.nvml_metrics import read_gpu_metrics
from meshwright.http_pages.allowed_hosts import AllowedHosts, parse_allowed_hosts
from meshwright.http_pages.metrics_page import make_metrics_page
from meshwright.http_pages.page_server import PageServer
from meshwright.observe.hardware.nvml import load_nvml

DEFAULT_PORT = 9421


def _client(part: str = "") -> Any:
    try:
        return import_module("prometheus_client" + part)
    except ImportError:
        hint = 'pip install "meshwright[fleet]"'
        raise MissingDependency("exporting needs prometheus-client", hint) from None


class ExporterCollector:
    """Asks GPUs and jobs each time the page is asked for."""

    def __init__(self, runs: Sequence[JobFolder], hostname: str = "", nvml: Any = None) -> None:
        self._core = _client(".core")
        self._runs, self._hostname = JobMetricReader(runs), hostname or socket.gethostname()
        self._nvml = load_nvml() if nvml is None else nvml

    @property
    def has_gpus(self) -> bool:
        """Whether this machine has GPUs that can be asked."""
        return self._nvml is not None

    def collect(self) -> Iterator[Any]:
        """Give families of metrics, as the client wants them."""
        families: dict[str, Any] = {}
        gpus = () if self._nvml is None else read_gpu_metrics(self._nvml, self._hostname)
        for sample in gpus:
            self._add(families, self._core.GaugeMetricFamily, sample)
        for sample in self._runs.read_metrics():
            counter = sample.is_counter
            kind = self._core.CounterMetricFamily if counter else self._core.GaugeMetricFamily
            host = sample._replace(labels=sample.labels | {"hostname": self._hostname})
            self._add(families, kind, host)
        yield from families.values()

    @staticmethod
    def _add(families: dict[str, Any], kind: Any, sample: MetricSample) -> None:
        if sample.name not in families:
            families[sample.name] = kind(sample.name, sample.help, labels=list(sample.labels))
        families[sample.name].add_metric(list(sample.labels.values()), sample.value)


class ExporterServer:
    """A page that is served until it is closed."""

    def __init__(self, server: PageServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, name="exporter", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_port

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def render_metrics(collector: ExporterCollector) -> str:
    """Return the page as text, for the textfile collector of node-exporter."""
    client = _client()
    registry = client.CollectorRegistry()
    registry.register(collector)
    return str(client.generate_latest(registry).decode())


def serve_metrics(
    collector: ExporterCollector,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    allowed_hosts: AllowedHosts | None = None,
) -> ExporterServer:
    """Serve the page; only to this machine, unless another address is named."""
    registry = _client().CollectorRegistry()
    registry.register(collector)
    answer = make_metrics_page(_client(".exposition").choose_encoder, registry)
    try:
        hosts = allowed_hosts or parse_allowed_hosts(None, host)
        return ExporterServer(PageServer((host, port), answer, hosts))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        what = f"{host}:{port} cannot be listened on: {reason}"
        raise InputError([Problem("--port", what, "use another port, or 0 for any")]) from None
