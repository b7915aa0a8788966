"""Sharded parameters and the communication hooks at the boundaries of sharded layers."""
