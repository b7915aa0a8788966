"""NCCL tuner files: nccl-tests results, tuning sweeps, and CSV rows for the tuner plugin."""
