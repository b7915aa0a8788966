"""Reinforcement learning from files of prompts: what is asked, in which order, and for what reward.

task_config         a task, as the file of a run gives it; `reward_config` what a reward is
prompt_files        files to prompts in tokens, each with how its answers are judged
prompt_environment  `PromptEnvironment`: prompts by number, and what answers are checked for
reward_scorer       reward models as judges, beside verifiers
"""
