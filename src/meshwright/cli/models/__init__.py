"""The `mw models` command: lists the model catalog or shows one entry."""
