"""The `mw serve` command: an OpenAI-compatible HTTP server with one or more engines."""
