"""The `mw timeline` subcommands: show, Perfetto export and repair of recorded timelines."""
