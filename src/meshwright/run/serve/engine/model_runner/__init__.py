"""Model runner: executes scheduled steps on one device, with CUDA graphs and device-side rows.

`ModelRunner` executes a step; `decode_graphs` and `mixed_graphs` capture and replay CUDA graphs.
"""
