"""Verifies collective algorithms symbolically and returns a proof or a counterexample."""
