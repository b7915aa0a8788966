"""What one operation costs on one device, in seconds; see `docs/guide/operator-costs.md`."""

from meshwright.predict.cost.attention import attention_flops, attention_s, unfused_attention_s
from meshwright.predict.cost.curves import (
    AttentionCurve,
    Calibration,
    LaunchCurve,
    MemoryCurve,
    ProductCurve,
    load_calibration,
    save_calibration,
)
from meshwright.predict.cost.device import (
    DeviceCosts,
    costs_for,
    measured_devices,
    under_load,
)
from meshwright.predict.cost.grouped import grouped_least_s, grouped_matmul_s
from meshwright.predict.cost.launch import eager_s, exposed_launch_s, graphed_s
from meshwright.predict.cost.matmul import linear_s, matmul_s
from meshwright.predict.cost.memory_bound import bytes_moved, memory_s, optimizer_s

__all__ = [
    "AttentionCurve",
    "Calibration",
    "DeviceCosts",
    "LaunchCurve",
    "MemoryCurve",
    "ProductCurve",
    "attention_flops",
    "attention_s",
    "bytes_moved",
    "costs_for",
    "eager_s",
    "exposed_launch_s",
    "graphed_s",
    "grouped_least_s",
    "grouped_matmul_s",
    "linear_s",
    "load_calibration",
    "matmul_s",
    "measured_devices",
    "memory_s",
    "optimizer_s",
    "save_calibration",
    "under_load",
    "unfused_attention_s",
]
