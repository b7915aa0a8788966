"""The `mw gpus` command: lists the GPU catalog or shows one entry with its sources."""
