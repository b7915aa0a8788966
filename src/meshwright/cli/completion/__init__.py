"""The `mw completion` command: shell completion scripts for bash, zsh and fish."""
