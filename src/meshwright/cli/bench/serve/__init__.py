"""The `mw bench serve` command: load tests of OpenAI-compatible servers, with plots."""
