"""Verifiers of text answers and generated programs."""
