"""Work spread over processes: collectives that run."""
