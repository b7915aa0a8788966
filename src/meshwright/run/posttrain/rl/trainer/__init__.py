"""The RL trainer: policy step, critic, microbatch losses, warmup and host offload.

`RLTrainer` owns the weights and the optimizer, `step_preparation` computes advantages, and
`PolicyStep` updates the policy.
"""
