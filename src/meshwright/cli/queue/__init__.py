"""The `mw queue` subcommands: replay, policy comparison and placement of cluster jobs."""
