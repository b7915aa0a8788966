"""The `mw data` subcommands: tokenize, inspect, train-tokenizer and sample."""
