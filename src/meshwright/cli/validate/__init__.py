"""The `mw validate` subcommands: predictions compared with published measurements.

Each kind of measurement has its own module: training, collectives, serving, rl and fleet.
"""
