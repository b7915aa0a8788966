"""Reads NCCL_DEBUG logs: communicators, channels, calls and warnings."""
