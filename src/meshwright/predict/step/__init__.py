"""Closed-form prediction of one training step: compute, communication, bubble and optimizer.

`block_time` and `block_comm` price one block, `stage_time` adds up the blocks of a pipeline chunk,
and `step_prediction` combines chunks, bubble and optimizer into a step.
"""
