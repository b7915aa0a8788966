"""Memory analysis: from a CUDA memory snapshot to peak, growth, fragmentation and shortages."""

from meshwright.observe.analyze.memory.report import DeviceMemory, memory_report, timeline

__all__ = ["DeviceMemory", "memory_report", "timeline"]
