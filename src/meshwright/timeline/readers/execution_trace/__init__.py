"""Reads PyTorch and Chakra execution traces, in JSON or protobuf."""
