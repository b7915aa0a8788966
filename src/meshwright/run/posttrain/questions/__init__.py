"""Reinforcement learning from files of prompts: what is asked, in which order, and for what reward.

task_settings  a task, as the file of a run gives it; `settings` what a reward is
reading        files to prompts in tokens, each with how its answers are judged
environment    `Questions`: prompts by their number, and what an answer has to be checked for
scoring        reward models as judges
judges         verifiers and reward models as one
"""
