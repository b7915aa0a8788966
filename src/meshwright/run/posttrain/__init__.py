"""Post-training: supervised, preference and reinforcement learning on the model that also serves.

lora         LoRA and DoRA: trained, merged, stored in PEFT's folders, served without merging
data         chats and preference pairs as packed tokens with loss masks
supervised   recipes on the trainer: answers, preferences, rewards, a teacher's thoughts
evaluation   exact answers, multiple choice and generated code, on held-out questions
rl           reinforcement learning: our engine draws, verifiers judge, the trainer learns
objectives   advantages, policy losses, preference losses, distillation: sums over whole steps
prompt_task  prompts of files with their rewards: exact answers, numbers, forms, reward models
rollout      environments, verifiers in bounded processes, rollouts recorded and played again
weight_sync  from the trainer's layout to the engine's, as a plan of slices
workers      engines that draw in processes of their own
"""

__all__: list[str] = []
