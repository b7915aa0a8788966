"""Run folders: configuration, locking, run state, timelines, and saved weights and results.

`run_folder` manages the folder; `run_state` and `state_tensors` define what a checkpoint stores.
"""
