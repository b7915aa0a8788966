"""Hardware state of a machine: NVML, process usage, telemetry samples and catalog lookup.

`nvml` and `process_usage` read the raw counters; `hardware_sample` and `telemetry_sampler`
sample and summarize them.
"""
