"""Rollout generation for RL: inline, threaded and replayed engines, and held-out evaluation."""
