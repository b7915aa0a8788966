"""Reads NVIDIA Nsight Systems exports (SQLite) into a `Timeline`.

`nsys_reader` is the entry point; the other modules extract rows, NVTX payloads and NCCL calls.
"""
