"""Output processing: detokenization, stop strings, reasoning and tool-call parsing."""
