"""What is asked of a cluster: tokens to train on, or requests to serve."""

from meshwright.spec.workload.arrivals import (
    Arrivals,
    ConstantArrivals,
    FixedConcurrency,
    GammaArrivals,
    PoissonArrivals,
    RecordedArrivals,
)
from meshwright.spec.workload.client_mix import ClientMix, WorkloadClient
from meshwright.spec.workload.lengths import (
    EmpiricalLength,
    FixedLength,
    Lengths,
    LogNormalLength,
    UniformLength,
    fit_empirical_length,
)
from meshwright.spec.workload.lora import LoRASpec, LoRATarget, get_lora_target, training_flops
from meshwright.spec.workload.request_trace import RequestTrace, read_requests, write_requests
from meshwright.spec.workload.requests import PrefixSharing, ServingWorkload, WorkloadRequest
from meshwright.spec.workload.servegen import read_clients
from meshwright.spec.workload.trace_summary import (
    LengthStats,
    TraceSummary,
    fit_workload,
    summarize_trace,
)
from meshwright.spec.workload.training import Packing, TrainingWorkload
from meshwright.spec.workload.workload import Workload, load_workload, read_workload

__all__ = [
    "Arrivals",
    "ClientMix",
    "ConstantArrivals",
    "EmpiricalLength",
    "FixedConcurrency",
    "FixedLength",
    "GammaArrivals",
    "LengthStats",
    "Lengths",
    "LoRASpec",
    "LoRATarget",
    "LogNormalLength",
    "Packing",
    "PoissonArrivals",
    "PrefixSharing",
    "RecordedArrivals",
    "RequestTrace",
    "ServingWorkload",
    "TraceSummary",
    "TrainingWorkload",
    "UniformLength",
    "Workload",
    "WorkloadClient",
    "WorkloadRequest",
    "fit_empirical_length",
    "fit_workload",
    "get_lora_target",
    "load_workload",
    "read_clients",
    "read_requests",
    "read_workload",
    "summarize_trace",
    "training_flops",
    "write_requests",
]
