"""Serving: an engine that answers many requests at a time, and its server."""
