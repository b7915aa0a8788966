"""The engine: decisions of the batcher carried out on a device, a step ahead of their results."""
