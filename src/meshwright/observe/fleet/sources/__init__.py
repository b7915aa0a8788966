"""Where a fleet's telemetry comes from; each kind of source fills the tables of `fleet.tables`."""

import gzip
import zlib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Protocol, cast

from meshwright.errors import InputError, Problem
from meshwright.observe.fleet.sources.source import (
    Asked,
    Batch,
    Secret,
    Source,
    bare,
    rows_of,
    some_of,
)
from meshwright.spec.names import unknown_name

__all__ = ["KINDS", "Asked", "Batch", "Secret", "Source", "bare", "find", "kinds", "rows_of"]

KINDS: Final = ("tables", "slurm", "prometheus", "kubernetes", "kernel", "public")
"""Kinds of sources in the order in which they are asked whether a place is theirs."""


class _Kind(Protocol):
    def claims(self, where: str) -> bool: ...

    def source(self, where: str, asked: Asked) -> Source: ...


def kinds() -> tuple[str, ...]:
    """Return the kinds of sources there are."""
    return tuple(kind for kind in KINDS if find_spec(f"{__name__}.{kind}") is not None)


def find(where: str, asked: Asked, kind: str = "") -> Source:
    """Open the source at a path or URL, of the kind that claims it or that is named."""
    if kind and kind not in kinds():
        raise InputError([unknown_name("kind of source", kind, kinds(), "--kind")])
    for name in (kind,) if kind else kinds():
        home = cast(_Kind, import_module(f"{__name__}.{name}"))
        if kind or home.claims(where):
            return home.source(where, asked)
    from meshwright.observe.fleet.sources import tables

    path = Path(where)
    if "://" not in where and not path.exists():
        what, fix = "there is no such file or folder", "name one that exists, or a URL"
    elif path.is_file() and _cut_off(path):
        what, fix = "is packed by gzip and cut off or damaged", "copy it again"
    elif path.is_file() and tables.table_of(path):
        # Reading it tells which columns are missing or unknown.
        return tables.source(where, asked)
    elif path.is_dir() and not any(path.iterdir()):
        what, fix = "the folder is empty", "name one with telemetry in it"
    elif path.is_file() and not path.stat().st_size:
        what, fix = "the file is empty", "name one with telemetry in it"
    else:
        what = "is of no kind of telemetry that is known here"
        fix = f"name a file that mw fleet ingest reads; it takes --kind {'|'.join(kinds())}"
        if path.is_dir() and (inside := sorted(p.name for p in path.iterdir() if p.is_dir())):
            fix = f"only public traces are sought in folders within it; name one: {some_of(inside)}"
    raise InputError([Problem(bare(where) if "://" in where else where, what, fix)])


def _cut_off(path: Path) -> bool:
    """Say whether a file is packed and cannot be unpacked to its end."""
    try:
        with gzip.open(path, "rb") as stream:
            while stream.read(1 << 20):
                pass
    except (EOFError, zlib.error):
        return True
    except OSError:  # It is not packed, or not ours to read.
        return False
    return False
