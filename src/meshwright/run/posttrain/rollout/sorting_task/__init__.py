"""Tasks that need no download: prompts, verifiers and a vocabulary of their own."""
