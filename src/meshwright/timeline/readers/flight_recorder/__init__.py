"""Reads PyTorch flight recorder dumps: process groups, operations and their progress."""
