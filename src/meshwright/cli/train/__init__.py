"""The `mw train` command: pretraining, supervised recipes and reinforcement learning.

`command` runs pretraining jobs, `recipe` and `rl` run post-training, and `local_ranks` starts one
process per GPU.
"""
