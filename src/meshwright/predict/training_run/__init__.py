"""Inputs of training predictions: `TrainingRun`, framework, step constants and GEMM shapes."""
