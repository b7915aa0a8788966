"""How a note says that a trace does not tell its rank, so that whoever reads notes finds it."""

INFERRED_RANK_NOTE_PREFIX = "the trace has no rank"
