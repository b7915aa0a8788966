"""What exporters call things, in which unit, and how that becomes a column of ours.

dcgm-exporter keeps the old names of DCGM's fields; DCGM itself has renamed many, and added fields
in base units beside some. All are read, and where a fleet mixes them each GPU's own is taken.
"""

from typing import Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

MIB: Final = float(1 << 20)
_BLANK_INT32, _BLANK_FP64 = 0x7FFF_FFF0, float(1 << 47)
_BLANKS = 16
"""Values from a blank on: not found, not supported, not permitted and their like."""


class MetricName(NamedTuple):
    """One spelling of a metric."""

    name: str
    scale: float | None = 1.0
    """Ours for one of theirs; None: a percentage or a share, which its values tell."""
    is_counter: bool = False
    """Whether it only grows, and its rate is meant."""


class MetricField(NamedTuple):
    """One column of samples of GPUs, and where it comes from."""

    column: str
    names: tuple[MetricName, ...]
    max_valid: float
    """No real value is above this: what is, was a blank that somebody scaled or averaged."""
    time_aggregation: Literal["avg", "max"] = "avg"
    """How samples between two moments become one."""
    mig_aggregation: Literal["share", "sum", "same"] = "same"
    """What instances of a divided GPU make together: by their part of it, their sum, or one."""


def _share(column: str, *names: str) -> MetricField:
    found = tuple(MetricName(each) for each in names)
    return MetricField(column, found, 1.0, mig_aggregation="share")


def _rate(column: str, way: str, link: str, most: float) -> MetricField:
    names = (
        MetricName(f"DCGM_FI_PROF_{link}_{way}_BYTES"),
        MetricName(f"DCGM_FI_PROF_{link}_{way}_BYTES_TOTAL", is_counter=True),
    )
    return MetricField(column, names, most, mig_aggregation="sum")


METRIC_FIELDS: Final = (
    MetricField(
        "gpu_util",
        (
            MetricName("DCGM_FI_DEV_GPU_UTIL", 0.01),
            # The new name of field 203, a percentage, and in later releases field 1613, a share.
            MetricName("DCGM_FI_DEV_GPU_UTIL_RATIO", None),
            MetricName("mw_gpu_util_ratio"),
            MetricName("nvidia_gpu_duty_cycle", 0.01),
            MetricName("nvidia_smi_utilization_gpu_ratio"),
        ),
        1.0,
        mig_aggregation="share",
    ),
    _share("engine_active", "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO"),
    _share("sm_active", "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_SM_UTIL_RATIO"),
    _share("sm_occupancy", "DCGM_FI_PROF_SM_OCCUPANCY", "DCGM_FI_PROF_SM_OCCUPANCY_RATIO"),
    _share("tensor_active", "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "DCGM_FI_PROF_TENSOR_UTIL_RATIO"),
    _share("dram_active", "DCGM_FI_PROF_DRAM_ACTIVE", "DCGM_FI_PROF_DRAM_UTIL_RATIO"),
    _share("fp16_active", "DCGM_FI_PROF_PIPE_FP16_ACTIVE", "DCGM_FI_PROF_FP16_UTIL_RATIO"),
    _share("fp32_active", "DCGM_FI_PROF_PIPE_FP32_ACTIVE", "DCGM_FI_PROF_FP32_UTIL_RATIO"),
    _share("fp64_active", "DCGM_FI_PROF_PIPE_FP64_ACTIVE", "DCGM_FI_PROF_FP64_UTIL_RATIO"),
    MetricField(
        "memory_used",
        (
            MetricName("DCGM_FI_DEV_FB_USED", MIB),
            MetricName("DCGM_FI_DEV_FB_USED_BYTES"),
            MetricName("mw_gpu_memory_used_bytes"),
            MetricName("nvidia_gpu_memory_used_bytes"),
            MetricName("nvidia_smi_memory_used_bytes"),
        ),
        1e13,
        "max",
        "sum",
    ),
    MetricField(
        "memory_total",
        (
            MetricName("DCGM_FI_DEV_FB_TOTAL", MIB),
            MetricName("DCGM_FI_DEV_FB_CAPACITY_BYTES"),
            MetricName("mw_gpu_memory_total_bytes"),
            MetricName("nvidia_gpu_memory_total_bytes"),
            MetricName("nvidia_smi_memory_total_bytes"),
        ),
        1e13,
        "max",
        "sum",
    ),
    MetricField(
        "power_w",
        (
            MetricName("DCGM_FI_DEV_POWER_USAGE"),
            MetricName("DCGM_FI_DEV_BOARD_POWER_WATTS"),
            MetricName("mw_gpu_power_watts"),
            MetricName("DCGM_FI_DEV_POWER_USAGE_INSTANT"),
            MetricName("DCGM_FI_DEV_BOARD_POWER_RAW_WATTS"),
            MetricName("nvidia_gpu_power_usage_milliwatts", 1e-3),
            MetricName("nvidia_smi_power_draw_watts"),
        ),
        1e4,
    ),
    MetricField(
        "temperature_c",
        (
            MetricName("DCGM_FI_DEV_GPU_TEMP"),
            MetricName("DCGM_FI_DEV_GPU_TEMP_CELSIUS"),
            MetricName("mw_gpu_temperature_celsius"),
            MetricName("nvidia_gpu_temperature_celsius"),
            MetricName("nvidia_smi_temperature_gpu"),
        ),
        300.0,
        "max",
    ),
    MetricField(
        "memory_temperature_c",
        (MetricName("DCGM_FI_DEV_MEMORY_TEMP"), MetricName("DCGM_FI_DEV_MEMORY_TEMP_CELSIUS")),
        300.0,
        "max",
    ),
    MetricField(
        "sm_clock_mhz",
        (
            MetricName("DCGM_FI_DEV_SM_CLOCK"),
            MetricName("DCGM_FI_DEV_SM_CLOCK_HERTZ", 1e-6),
            MetricName("mw_gpu_sm_clock_hertz", 1e-6),
        ),
        1e4,
    ),
    MetricField(
        "throttle",
        (
            MetricName("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS"),
            MetricName("DCGM_FI_DEV_CLOCKS_EVENT_REASONS"),
            MetricName("mw_gpu_throttle_reasons"),
        ),
        float(1 << 20),
        "max",  # bits have no mean; the pattern of most severity that was seen stays one pattern
    ),
    _rate("pcie_tx", "TX", "PCIE", 1e12),
    _rate("pcie_rx", "RX", "PCIE", 1e12),
    _rate("nvlink_tx", "TX", "NVLINK", 1e13),
    _rate("nvlink_rx", "RX", "NVLINK", 1e13),
)
"""In the order of `tables.METRICS`."""

UNUSED_MEMORY_FIELDS: Final = (
    MetricField("free", (MetricName("DCGM_FI_DEV_FB_FREE", MIB),), 1e13, "max", "sum"),
    MetricField("reserved", (MetricName("DCGM_FI_DEV_FB_RESERVED", MIB),), 1e13, "max", "sum"),
)
"""What makes the total together with what is used: dcgm-exporter leaves the total out."""


THROTTLE_COUNTERS: Final = {
    0x04: ("DCGM_FI_DEV_POWER_VIOLATION", "DCGM_FI_DEV_GPU_POWER_THROTTLE_SECONDS_TOTAL"),
    0x40: ("DCGM_FI_DEV_THERMAL_VIOLATION", "DCGM_FI_DEV_GPU_THERMAL_THROTTLE_SECONDS_TOTAL"),
}
"""Counters of time for which clocks were held back, by the bit of the reason: they stand in where
reasons are not exported. Their units differ; that they grow does not."""


class FaultMetric(NamedTuple):
    """A metric of which a change is an event."""

    names: tuple[str, ...]
    kind: str
    text: str
    value_kind: Literal["code", "window", "counter", "flag"] = "counter"
    """`code`: the value is the newest Xid, which stays; `window`: a count over the last minutes;
    `counter`: grows, and begins anew after a reset; `flag`: nought or one."""


def _nvlink(what: str, text: str) -> FaultMetric:
    old, new = f"DCGM_FI_DEV_NVLINK_{what}_COUNT_TOTAL", f"DCGM_FI_DEV_NVLINK_{what}_TOTAL"
    return FaultMetric((old, new), "nvlink", text)


FAULT_METRICS: Final = (
    FaultMetric(("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR"), "xid", "", "code"),
    FaultMetric(("DCGM_EXP_XID_ERRORS_COUNT",), "xid", "", "window"),
    FaultMetric(("DCGM_EXP_XID_ERRORS_TOTAL",), "xid", ""),
    FaultMetric(("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL",), "ecc_corrected", "corrected errors of memory"),
    FaultMetric(("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL",), "ecc", "uncorrected errors of memory"),
    FaultMetric(
        ("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_ROW_REMAP_CORRECTABLE_TOTAL"),
        "row_remap",
        "rows remapped after corrected errors",
    ),
    FaultMetric(
        ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL"),
        "row_remap",
        "rows remapped after uncorrected errors",
    ),
    FaultMetric(("DCGM_FI_DEV_ROW_REMAP_PENDING",), "row_remap", "rows wait for a reset", "flag"),
    FaultMetric(
        ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "DCGM_FI_DEV_ROW_REMAP_FAILED"),
        "row_remap",
        "a row could not be remapped",
        "flag",
    ),
    FaultMetric(
        ("DCGM_FI_DEV_PCIE_REPLAY_COUNTER", "DCGM_FI_DEV_PCIE_REPLAY_TOTAL"), "pcie", "replays"
    ),
    _nvlink("CRC_FLIT_ERROR", "flit checksums wrong"),
    _nvlink("CRC_DATA_ERROR", "data checksums wrong"),
    _nvlink("REPLAY_ERROR", "replays"),
    _nvlink("RECOVERY_ERROR", "recoveries"),
)
"""Of GPUs."""

PORT_FAULT_METRICS: Final = tuple(
    FaultMetric((f"node_infiniband_{name}_total",), "infiniband", text)
    for name, text in (
        ("link_downed", "link went down"),
        ("link_error_recovery", "link recovered from errors"),
        ("symbol_error", "symbol errors"),
        ("port_errors_received", "packets received with errors"),
        ("local_link_integrity_errors", "link integrity errors"),
        ("excessive_buffer_overrun_errors", "buffer overruns"),
        ("port_discards_transmitted", "packets that could not be sent"),
    )
)
"""Of ports of InfiniBand and RoCE, as node-exporter counts them."""


def mask_blanks(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return values with NaN in place of DCGM's marks for what it does not know.

    They begin at 0x7ffffff0 for 32-bit integers and at 2**47 for doubles, beyond which 64-bit ones
    lie as well; some exporters multiply percentages by 100 without a look.
    """
    small = (values >= _BLANK_INT32) & (values < _BLANK_INT32 + _BLANKS)
    scaled = values / 100
    small |= (scaled >= _BLANK_INT32) & (scaled < _BLANK_INT32 + _BLANKS)
    small &= np.floor(values) == values
    return np.where(small | (values >= _BLANK_FP64), np.nan, values)


def convert_unit(
    values: npt.NDArray[np.float64], name: MetricName, field: MetricField
) -> npt.NDArray[np.float64]:
    """Return values in our unit, and NaN for what cannot be one."""
    known = mask_blanks(values) * (1.0 if name.scale is None else name.scale)
    # Sampling jitter takes shares a little above one; the rest above the limit is no measurement.
    known = np.where(
        known > field.max_valid * (1.02 if field.max_valid == 1.0 else 1.0), np.nan, known
    )
    known = np.where(known < 0, np.nan, known)
    return np.minimum(known, 1.0) if field.max_valid == 1.0 else known
