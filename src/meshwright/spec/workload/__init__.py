"""What is asked of a cluster: tokens to train on, or requests to serve."""

from meshwright.spec.workload.adapter import Adapter, Target, target_of, trained_flops
from meshwright.spec.workload.arrivals import (
    Arrivals,
    Concurrency,
    Constant,
    Gamma,
    Poisson,
    Times,
)
from meshwright.spec.workload.clients import Client, Clients
from meshwright.spec.workload.lengths import (
    Empirical,
    Fixed,
    Lengths,
    LogNormal,
    Uniform,
    histogram,
)
from meshwright.spec.workload.requests import Prefixes, Request, Requests
from meshwright.spec.workload.servegen import read_clients
from meshwright.spec.workload.summary import Spread, Summary, fit, summarise
from meshwright.spec.workload.traces import RequestTrace, read_requests, write_requests
from meshwright.spec.workload.training import Packing, Training
from meshwright.spec.workload.workload import Workload, load_workload, read_workload

__all__ = [
    "Adapter",
    "Arrivals",
    "Client",
    "Clients",
    "Concurrency",
    "Constant",
    "Empirical",
    "Fixed",
    "Gamma",
    "Lengths",
    "LogNormal",
    "Packing",
    "Poisson",
    "Prefixes",
    "Request",
    "RequestTrace",
    "Requests",
    "Spread",
    "Summary",
    "Target",
    "Times",
    "Training",
    "Uniform",
    "Workload",
    "fit",
    "histogram",
    "load_workload",
    "read_clients",
    "read_requests",
    "read_workload",
    "summarise",
    "target_of",
    "trained_flops",
    "write_requests",
]
