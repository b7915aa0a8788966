"""Post-training: supervised, preference and reinforcement learning on the model that also serves.

adapters    LoRA and DoRA: trained, merged, stored in PEFT's folders, served without merging
data        chats and preference pairs as packed tokens with loss masks
evaluate    exact answers, multiple choice and generated code, on held-out questions
loop        reinforcement learning: our engine draws, verifiers judge, the trainer learns
objectives  advantages, policy losses, preference losses, distillation: sums over whole steps
questions   prompts of files with their rewards: exact answers, numbers, forms, reward models
rollouts    environments, verifiers in bounded processes, rollouts recorded and played again
weights     from the trainer's layout to the engine's, as a plan of slices
"""

__all__: list[str] = []
