"""Objectives of post-training as pure functions on tensors: sums over the totals of a whole step.

choices                 names of estimators and aggregations, as settings have them
masked_tokens           which tokens count and whose they are, padded or packed alike
loss_weights            weights of tokens over the totals of all microbatches and ranks
group_advantages        of answers over their group; DAPO's filter and penalty
token_advantages        of tokens: discounted, whitened, with a critic; the critic's loss
policy_loss             PPO's clip, GSPO, CISPO, REINFORCE
kl_penalty              KL to a reference, in the reward or in the loss
importance_correction   weights against a sampler that is not quite the policy
preference_loss         DPO, IPO, KTO, reward models
distillation_loss       from a teacher's likeliest tokens
token_logprobs          log-probabilities from hidden vectors, without all logits at once; also of
                        all others
vocab_parallel_logprobs the same where ranks hold some tokens of the vocabulary each
step_metrics            what a person needs to see of a step

Import from the modules. A step of GRPO over microbatches, each with its own `tokens`:

    advantage_S = group_advantages.normalized_advantages(reward_S, group_S)  # of the whole step
    totals = loss_weights.sum_step_totals(all_tokens)
    advantage = tokens.broadcast_to_tokens(advantage_S[own])
    loss = policy_loss.ppo_clip_loss(logp, old, advantage, tokens, clip_ratio_high=0.28)
    weight = loss_weights.compute_token_weights(tokens, totals)
    weight *= importance_correction.truncated_importance_weights(old, sampled, tokens)
    loss_weights.weighted_sum(loss.losses, weight).backward()  # gradients add up
"""

__all__: list[str] = []
