"""Memory analysis: from a CUDA memory snapshot to peak, growth, fragmentation and shortages."""

from meshwright.observe.analyze.memory.memory_report import (
    DeviceMemoryReport,
    analyze_memory,
    downsample_live_bytes,
)

__all__ = ["DeviceMemoryReport", "analyze_memory", "downsample_live_bytes"]
