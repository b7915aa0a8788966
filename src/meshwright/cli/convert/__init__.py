"""The `mw convert` command: exports a training checkpoint as a Hugging Face model folder."""
