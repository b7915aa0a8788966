"""`PrometheusLogger`: the newest figures as gauges, served over HTTP by a thread of its own."""

import re
import threading
from importlib import import_module
from typing import Any

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.http_pages.allowed_hosts import parse_allowed_hosts
from meshwright.http_pages.metrics_page import make_metrics_page
from meshwright.http_pages.page_server import PageServer
from meshwright.run.train.logging.logger import StepMetricValues
from meshwright.run.train.logging.logging_config import PrometheusConfig

# Prometheus spells units out: https://prometheus.io/docs/practices/naming/
_ENDINGS = (("_per_s", "_per_second"), ("_s", "_seconds"), ("_fraction", "_ratio"))


class PrometheusLogger:
    """Serves `mw_train_loss`, `mw_train_tokens_per_second` and the like."""

    def __init__(self, settings: PrometheusConfig) -> None:
        try:
            client = import_module("prometheus_client")
        except ImportError:
            hint = "pip install prometheus-client"
            raise MissingDependency("the Prometheus output needs prometheus-client", hint) from None
        self._registry = client.CollectorRegistry()  # not the one that all of a process share
        self._gauge = client.Gauge
        self._gauges: dict[str, Any] = {}
        encoders = import_module("prometheus_client.exposition")
        answer = make_metrics_page(encoders.choose_encoder, self._registry)
        hosts = parse_allowed_hosts(None, settings.host)
        try:
            self._server = PageServer((settings.host, settings.port), answer, hosts)
        except (OSError, OverflowError) as error:
            what = f"{settings.host}:{settings.port} cannot be listened on: {error}"
            fix = "use another port, or 0 for any free one"
            raise InputError([Problem("logging.prometheus.port", what, fix)]) from None
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._server.server_port

    def write(self, step: int, figures: StepMetricValues) -> None:
        """Show the figures of a step in place of those before it."""
        for name, value in {"step": step, **figures}.items():
            metric = format_metric_name(name)
            if metric not in self._gauges:
                text = f"{name} of the newest step"
                self._gauges[metric] = self._gauge(metric, text, registry=self._registry)
            self._gauges[metric].set(value)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def format_metric_name(figure: str) -> str:
    """Return the name of a figure in Prometheus: `tokens_per_s` is `mw_train_tokens_per_second`."""
    for short, long in _ENDINGS:
        if figure.endswith(short):
            figure = figure.removesuffix(short) + long
            break
    return "mw_train_" + re.sub(r"[^a-z0-9_]", "_", figure.lower())
