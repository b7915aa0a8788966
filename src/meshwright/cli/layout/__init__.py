"""The `mw layout` subcommands: checks, memory estimates, and framework config import and export."""
