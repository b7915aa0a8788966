"""The `mw clusters` command: lists the cluster catalog or shows one entry."""
