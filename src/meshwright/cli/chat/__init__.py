"""The `mw chat` command: an interactive terminal chat with a local or remote model."""
