"""The kinds of telemetry sources; opens the source at a path or URL.

Each kind of source fills the tables of `fleet.tables`. Its module loads when a place is matched
against it.
"""

import contextlib
import gzip
import stat
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from meshwright.errors import InputError, Problem
from meshwright.fleet.sources.source import (
    SourceOptions,
    TelemetrySource,
    abbreviate_names,
    strip_credentials,
)
from meshwright.spec.name_suggestions import build_unknown_name_problem

__all__ = ["SOURCE_KINDS", "SourceKind", "open_source"]


class SourceKind(Protocol):
    """What the module of a kind of source offers."""

    def matches(self, where: str) -> bool:
        """Return whether a path or URL looks like a source of this kind."""

    def open_source(self, where: str, asked: SourceOptions) -> TelemetrySource:
        """Open the source at a path or URL."""


def _load_tables() -> SourceKind:
    from meshwright.fleet.sources import table_files

    return table_files


def _load_slurm() -> SourceKind:
    from meshwright.fleet.sources.slurm import slurm_source

    return slurm_source


def _load_prometheus() -> SourceKind:
    from meshwright.fleet.sources.prometheus import prometheus_source

    return prometheus_source


def _load_kubernetes() -> SourceKind:
    from meshwright.fleet.sources.kubernetes import kubernetes_source

    return kubernetes_source


def _load_kernel() -> SourceKind:
    from meshwright.fleet.sources.kernel import kernel_log_source

    return kernel_log_source


def _load_public() -> SourceKind:
    from meshwright.fleet.sources.public_traces import public_trace_source

    return public_trace_source


_LOADERS: Final[dict[str, Callable[[], SourceKind]]] = {
    "tables": _load_tables,
    "slurm": _load_slurm,
    "prometheus": _load_prometheus,
    "kubernetes": _load_kubernetes,
    "kernel": _load_kernel,
    "public": _load_public,
}
SOURCE_KINDS: Final = tuple(_LOADERS)
"""Kinds of sources, in the order in which a place is matched against them."""


def open_source(where: str, asked: SourceOptions, kind: str = "") -> TelemetrySource:
    """Open the source at a path or URL, of the kind that is named or that matches it."""
    if kind and kind not in _LOADERS:
        raise InputError(
            [build_unknown_name_problem("kind of source", kind, SOURCE_KINDS, "--kind")]
        )
    _require_readable(where)
    if asked.columns:
        if kind not in ("", "public") or "://" in where:
            what = "maps the columns of a file of jobs, and of nothing else"
            raise InputError([Problem("--column", what, "leave it out")])
        return _load_public().open_source(where, asked)
    for name in (kind,) if kind else SOURCE_KINDS:
        module = _LOADERS[name]()
        if kind or module.matches(where):
            return module.open_source(where, asked)
    return _open_unknown(where, asked)


def _require_readable(where: str) -> None:
    """Refuse devices and pipes, which end never or only once."""
    mode = 0
    if "://" not in where:
        with contextlib.suppress(OSError, ValueError):
            mode = Path(where).stat().st_mode
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode) or stat.S_ISFIFO(mode):
        what = "is a device or a pipe, and no file"
        raise InputError([Problem(where, what, "write its content into a file first")])


def _open_unknown(where: str, asked: SourceOptions) -> TelemetrySource:
    """Say what is wrong with a place that no kind of source knows."""
    from meshwright.fleet.sources import table_files

    path = Path(where)
    if "://" not in where and not path.exists():
        what, fix = "there is no such file or folder", "name one that exists, or a URL"
    elif path.is_file() and _cut_off(path):
        what, fix = "is packed by gzip and cut off or damaged", "copy it again"
    elif path.is_file() and table_files.parse_table_name(path):
        # Reading it tells which columns are missing or unknown.
        return table_files.open_source(where, asked)
    elif path.is_dir() and not any(path.iterdir()):
        what, fix = "the folder is empty", "name one with telemetry in it"
    elif path.is_file() and not path.stat().st_size:
        what, fix = "the file is empty", "name one with telemetry in it"
    else:
        what = "is of no kind of telemetry that is known here"
        kinds = "|".join(SOURCE_KINDS)
        fix = f"name a file that mw fleet ingest reads; it takes --kind {kinds}"
        if path.is_dir() and (inside := sorted(p.name for p in path.iterdir() if p.is_dir())):
            names = abbreviate_names(inside)
            fix = f"only public traces are sought in folders within it; name one: {names}"
        elif path.is_file():
            from meshwright.fleet.sources.public_traces.unknown_file import describe_unknown_table

            if (found := describe_unknown_table(path)) is not None:
                raise InputError([found])
    raise InputError([Problem(strip_credentials(where) if "://" in where else where, what, fix)])


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
