"""Paths that are kept beside a run, and have to be found again from another folder."""

import os


def make_absolute_path(path: str) -> str:
    """Return a path as it is found from any folder, with its links as they are; none stays none."""
    return path and os.path.abspath(path)  # noqa: PTH100 - `resolve` would follow links
