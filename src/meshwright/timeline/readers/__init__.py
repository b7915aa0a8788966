"""Reads what other tools recorded, each format into the same `Timeline`."""
