"""Predictions scored against published training, serving, collective and RL measurements."""
