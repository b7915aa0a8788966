"""Reads untrusted pickles safely: only plain containers and scalars, without running code."""
