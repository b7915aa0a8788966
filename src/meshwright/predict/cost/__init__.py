"""What one operation costs on one device, in seconds; see `docs/guide/operator-costs.md`."""

from meshwright.predict.cost.attention import attention_flops, attention_s, unfused_attention_s
from meshwright.predict.cost.calibration import Calibration, load_calibration, save_calibration
from meshwright.predict.cost.curves import AttentionCurve, GemmCurve, LaunchCurve, MemoryCurve
from meshwright.predict.cost.device_costs import (
    DeviceCosts,
    apply_sustained_load,
    build_device_costs,
    list_measured_devices,
)
from meshwright.predict.cost.gemm import gemm_s, linear_s
from meshwright.predict.cost.grouped_gemm import grouped_gemm_bound_s, grouped_gemm_s
from meshwright.predict.cost.launch_overhead import cuda_graph_s, eager_s, exposed_launch_s
from meshwright.predict.cost.memory_bound import bytes_moved, memory_s, optimizer_s

__all__ = [
    "AttentionCurve",
    "Calibration",
    "DeviceCosts",
    "GemmCurve",
    "LaunchCurve",
    "MemoryCurve",
    "apply_sustained_load",
    "attention_flops",
    "attention_s",
    "build_device_costs",
    "bytes_moved",
    "cuda_graph_s",
    "eager_s",
    "exposed_launch_s",
    "gemm_s",
    "grouped_gemm_bound_s",
    "grouped_gemm_s",
    "linear_s",
    "list_measured_devices",
    "load_calibration",
    "memory_s",
    "optimizer_s",
    "save_calibration",
    "unfused_attention_s",
]
