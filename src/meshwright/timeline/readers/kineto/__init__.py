"""Reads PyTorch profiler (Kineto) traces into a `Timeline`."""
