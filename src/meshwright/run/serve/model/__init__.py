"""The model side of serving: weights, words, the paged cache and one step over it."""
