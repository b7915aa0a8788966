"""The label of a token that does not count: what data writes and the loss leaves out."""

IGNORE_INDEX = -100
"""torch's own `ignore_index`."""
