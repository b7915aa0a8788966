"""Slurm: accounting, controller, REST daemon and prologs, or files of what they printed.

A source is a file or folder, `slurm://` for the commands of this machine, and
`slurm+http://HOST:6820`, `slurm+https://…` or `slurm+unix:///PATH` for slurmrestd.
"""

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from meshwright.errors import InputError, Problem
from meshwright.fleet.sources.slurm.command_source import OVERLAP_S, SlurmCommandSource
from meshwright.fleet.sources.slurm.file_source import SlurmFileSource, find_files
from meshwright.fleet.sources.slurm.formats.hostlist import expand_hostlist
from meshwright.fleet.sources.slurm.formats.local_time import require_zone
from meshwright.fleet.sources.slurm.formats.sacct import read_sacct
from meshwright.fleet.sources.slurm.rest_source import SlurmRestSource
from meshwright.fleet.sources.slurm.tables.jobs import build_job_rows
from meshwright.fleet.sources.source import SourceOptions, TelemetrySource
from meshwright.spec.name_suggestions import build_unknown_name_problem

__all__ = [
    "OPTIONS",
    "build_job_rows",
    "expand_hostlist",
    "matches",
    "open_source",
    "parse_renames",
    "read_sacct",
]

OPTIONS: Final = {
    "zone": "time zone that files of text were printed in (default UTC)",
    "renames": "nodes that were renamed, `old=new,a[1-4]=b[1-4]`, or a file of such lines",
    "map": "log that prologs keep of who holds which GPU, for slurm://",
    "overlap_s": "seconds before the last look that are asked for again (default 3600)",
    "user": "user of the token, for slurmrestd",
}
"""What `--option NAME=VALUE` may say."""
_REST: Final = ("slurm+http://", "slurm+https://", "slurm+unix:", "unix:")


def matches(where: str) -> bool:
    """Say whether a path or URL looks like Slurm's."""
    if where.startswith(("slurm:", *_REST)):
        return True
    if "://" in where:
        return False
    path = Path(where)
    return _is_socket(path) or (path.exists() and bool(find_files(path)))


def open_source(where: str, asked: SourceOptions) -> TelemetrySource:
    """Open files, the commands of this machine, or a slurmrestd."""
    unknown = [name for name in asked.kind_options if name not in OPTIONS]
    if unknown:
        raise InputError(
            [build_unknown_name_problem("option", name, OPTIONS, "--option") for name in unknown]
        )
    renames = parse_renames(asked.kind_options.get("renames", ""))
    zone = require_zone(asked.kind_options.get("zone", "UTC"))
    overlap_s = _seconds(asked.kind_options.get("overlap_s", ""))
    if where.startswith("slurm:"):
        named = where.removeprefix("slurm:").strip("/")
        asked = asked._replace(cluster=asked.cluster or named)
        return SlurmCommandSource(asked, renames, asked.kind_options.get("map", ""), overlap_s)
    if where.startswith(_REST) or "://" in where or _is_socket(Path(where)):
        return SlurmRestSource(where, asked, renames, asked.kind_options.get("user", ""), overlap_s)
    return SlurmFileSource(Path(where), asked, zone, renames)


def parse_renames(told: str) -> Mapping[str, str]:
    """Read which nodes were renamed; folded lists on both sides stand for pairs in order."""
    if told and "=" not in told:
        try:
            told = ",".join(Path(told).read_text(encoding="utf-8").split())
        except OSError as error:
            what = f"is neither old=new nor a file that can be read: {error.strerror}"
            raise InputError([Problem("renames", f"{told!r} {what}")]) from error
    renames: dict[str, str] = {}
    for pair in _pairs(told):
        old, _, new = pair.partition("=")
        olds, news = expand_hostlist(old), expand_hostlist(new)
        if not olds or len(olds) != len(news):
            what = f"{pair!r} names {len(olds)} old and {len(news)} new nodes"
            raise InputError([Problem("renames", what, "write as many on both sides of =")])
        renames |= dict(zip(olds, news, strict=True))
    return renames


def _pairs(told: str) -> list[str]:
    depth, start, pairs = 0, 0, []
    for place, letter in enumerate(f"{told},"):
        depth += (letter == "[") - (letter == "]")
        if letter == "," and not depth:
            pairs.append(told[start:place])
            start = place + 1
    return [pair for pair in pairs if pair]


def _seconds(told: str) -> float:
    try:
        seconds = float(told) if told else OVERLAP_S
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < 1e9:
        raise InputError([Problem("overlap_s", f"{told!r} is no number of seconds", "write 3600")])
    return seconds


def _is_socket(path: Path) -> bool:
    try:
        return stat.S_ISSOCK(path.stat().st_mode)
    except OSError:
        return False
