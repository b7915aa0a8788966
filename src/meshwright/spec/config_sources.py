"""Where each value of a run comes from: defaults < files, left to right < environment < flags.

`merge_sources` lays plain data from several sources over each other, field by field, and remembers
who said what, so that `--dry-run` can show it. It reads neither files nor the environment itself.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class ConfigSource(NamedTuple):
    """One place that sets values, such as a file, the environment or the command line."""

    name: str
    data: Mapping[str, Any]


class ResolvedConfig(NamedTuple):
    """Merged plain data and, for every leaf path, the source that had the last word."""

    data: dict[str, Any]
    origins: dict[str, str]


def get_source_name(path: str, origins: Mapping[str, str]) -> str:
    """Name who set a value, or filled in a table; "default" where nobody did."""
    found = [
        origin for known, origin in origins.items() if known == path or known.startswith(f"{path}.")
    ]
    return ", ".join(dict.fromkeys(found)) or "default"


def merge_sources(sources: Iterable[ConfigSource]) -> ResolvedConfig:
    """Merge sources, later ones winning; tables merge field by field, all else is replaced."""
    data: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for source in sources:
        _merge(data, source.data, "", source.name, origins)
    return ResolvedConfig(data, origins)


def _merge(
    into: dict[str, Any],
    data: Mapping[str, Any],
    where: str,
    name: str,
    origins: dict[str, str],
) -> None:
    for key, value in data.items():
        path = f"{where}{key}"
        if isinstance(value, Mapping) and not _replaces(into.get(key), value):
            inner = into.get(key)
            table = dict(inner) if isinstance(inner, Mapping) else {}
            into[key] = table
            if not isinstance(inner, Mapping):
                _forget(origins, path)
            _merge(table, value, f"{path}.", name, origins)
        else:
            into[key] = value
            _forget(origins, path)
            origins[path] = name


def _replaces(old: object, new: Mapping[str, Any]) -> bool:
    """Tell whether a table of another kind takes the place of the old one instead of merging."""
    return isinstance(old, Mapping) and "kind" in new and old.get("kind") != new["kind"]


def _forget(origins: dict[str, str], path: str) -> None:
    for known in [key for key in origins if key == path or key.startswith(f"{path}.")]:
        del origins[known]
