"""Objectives of post-training as pure functions on tensors: sums over the totals of a whole step.

tokens        which tokens count and whose they are, padded or packed alike
averaging     weights of tokens over the totals of all microbatches and ranks
advantages    of answers over their group; DAPO's filter and penalty
returns       of tokens: discounted, whitened, with a critic; the critic's loss
policy        PPO's clip, GSPO, CISPO, REINFORCE
divergence    KL to a reference, in the reward or in the loss
mismatch      weights against a sampler that is not quite the policy
preference    DPO, IPO, KTO, reward models
distillation  from a teacher's likeliest words
chosen        log-probabilities from hidden vectors, without all logits at once; also of all others
shared_words  the same where ranks hold some words each
signals       what a person needs to see of a step

Import from the modules. A step of GRPO over microbatches, each with its own `tokens`:

    advantage_S = advantages.z_scored(reward_S, group_S)               # once, for the whole step
    of = averaging.totals(all_tokens)
    loss = policy.clipped(logp, old, tokens.spread(advantage_S[own]), tokens, high=0.28)
    weight = averaging.weights(tokens, of) * mismatch.truncated(old, sampled, tokens)
    averaging.weighted_sum(loss.losses, weight).backward()             # gradients add up
"""

__all__: list[str] = []
