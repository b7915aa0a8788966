"""Where the metrics of a run go: a file, TensorBoard, Weights & Biases, Prometheus, stderr.

LoggingConfig   which loggers, and how often
open_loggers    opens them
MetricLogger    the protocol of one: `write(step, metrics)` and `close()`
MetricLoggers   several as one
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.train.logging.logger import MetricLogger, MetricLoggers, StepMetricValues
    from meshwright.run.train.logging.logger_setup import open_loggers
    from meshwright.run.train.logging.logging_config import (
        LoggingConfig,
        PrometheusConfig,
        WandbConfig,
    )

_MODULES = {
    "StepMetricValues": "meshwright.run.train.logging.logger",
    "MetricLogger": "meshwright.run.train.logging.logger",
    "LoggingConfig": "meshwright.run.train.logging.logging_config",
    "MetricLoggers": "meshwright.run.train.logging.logger",
    "PrometheusConfig": "meshwright.run.train.logging.logging_config",
    "WandbConfig": "meshwright.run.train.logging.logging_config",
    "open_loggers": "meshwright.run.train.logging.logger_setup",
}

__all__ = [
    "LoggingConfig",
    "MetricLogger",
    "MetricLoggers",
    "PrometheusConfig",
    "StepMetricValues",
    "WandbConfig",
    "open_loggers",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
