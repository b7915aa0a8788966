"""Command-line flags shared by several commands, with their parsing and validation.

Most modules pair an `add_*` function, which declares flags, with a `read_*` function, which
turns parsed arguments into values.
"""
