"""Reads Slurm jobs, nodes and allocations from commands, slurmrestd or saved command output.

`command_source`, `rest_source` and `file_source` collect the data, `formats` parses it, and
`tables` converts it to rows of the shared tables.
"""
