"""The `mw collective` subcommands for collective algorithms and NCCL.

Each subcommand has its own module: list, show, verify, simulate, synthesize, export, bench and
explain.
"""
