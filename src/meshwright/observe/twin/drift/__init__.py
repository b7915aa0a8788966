"""Step-time drift of a training run: monitor, detector, findings and slow-rank search."""
