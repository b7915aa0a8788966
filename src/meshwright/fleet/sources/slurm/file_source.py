"""Files that Slurm's commands printed: one, or a folder of them."""

import gzip
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final, cast

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.fleet.sources.slurm.formats.sacct import is_sacct_header, read_sacct
from meshwright.fleet.sources.slurm.formats.scontrol import iter_blocks
from meshwright.fleet.sources.slurm.snapshot import SlurmSnapshot, parse_json, split_batches
from meshwright.fleet.sources.slurm.tables import nodes
from meshwright.fleet.sources.slurm.tables.allocations import read_prolog_log
from meshwright.fleet.sources.source import (
    ConflictRule,
    RowBatch,
    SourceOptions,
    abbreviate_names,
    list_unread_files,
)

_HEAD_BYTES: Final = 4096
_LOCAL_KINDS: Final = {"sacct", "scontrol", "events"}
"""Kinds of output with times of the zone that they were printed in."""
_TOGETHER_BYTES: Final = 2 << 30
"""Dumps of more than this are folded one by one; attempts are then counted within each."""
_MAP = re.compile(rb"(?m)^\d+(?:\.\d+)? (?:prolog|epilog) .*\bjob=\d")
_BLOCK = re.compile(rb"(?:^|\n)\s*(?:JobId|NodeName)=\S+ ")
_NODE = re.compile(rb"[\w.\-]+ *\|.*\| *\d+/\d+/\d+/\d+ *(?:\||$)")
"""A line of `sinfo -N` without a header: a node, and its cores in use, idle, otherwise, in all."""
_DOCUMENT = re.compile(rb'"(?:jobs|nodes|sinfo|meta)"\s*:')
_SLURM = re.compile(rb'(?i)slurm|data_parser|array_job_id|allocation_nodes|^\s*{\s*"sinfo"')


def detect_kind(path: Path) -> str:
    """Say which command's output a file is; empty: none that is known."""
    if not path.is_file():
        return ""
    try:
        with _opened(path) as stream:
            head = stream.read(_HEAD_BYTES)
    except (OSError, EOFError):
        return ""
    first = head.lstrip(b"\xef\xbb\xbf \n").partition(b"\n")[0]
    if first.startswith(b"{"):
        return "json" if _DOCUMENT.search(head) and _SLURM.search(head) else ""
    if _BLOCK.search(head):
        return "scontrol"
    if _MAP.search(head):
        return "map"
    if is_sacct_header(first):
        return "sacct"
    names = set(first.split(b"|"))
    if {b"NodeName", b"TimeStart"} <= names:
        return "events"
    if _NODE.match(first):
        return "sinfo"
    return "sinfo" if {b"NODELIST", b"STATE"} <= names and b"JOBID" not in names else ""


def find_files(where: Path) -> list[tuple[Path, str]]:
    """Return the files of Slurm's at a path, with their kinds."""
    paths = sorted(where.iterdir()) if where.is_dir() else [where]
    return [(path, kind) for path in paths if (kind := detect_kind(path))]


class SlurmFileSource:
    """A source of what Slurm's commands printed into files."""

    conflict_rule = ConflictRule.REPORT

    def __init__(
        self, where: Path, asked: SourceOptions, zone: str, renames: Mapping[str, str]
    ) -> None:
        self._where, self._asked, self._zone, self._renames = where, asked, zone, renames
        self._is_zone_assumed = "zone" not in asked.kind_options
        self._files = find_files(where)
        if not self._files:
            what = "holds nothing that sacct, scontrol, sinfo, sacctmgr or a prolog wrote"
            fix = "print it with a header: sacct -a -D -P -o ALL, or sacct --json"
            raise InputError([Problem(str(where), what, fix)])

    @property
    def name(self) -> str:
        """What it is and where."""
        return f"slurm:{self._where.absolute()}"

    def read_batches(self, cursor: str | None = None) -> Iterator[RowBatch]:
        """Give all rows; none where no file has changed since the cursor."""
        now = json.dumps([[p.name, p.stat().st_size, p.stat().st_mtime_ns] for p, _ in self._files])
        if now == cursor:
            return
        large = sum(path.stat().st_size for path, _ in self._files) > _TOGETHER_BYTES
        groups = [[entry] for entry in self._files] if large else [self._files]
        for place, group in enumerate(groups):
            reading = SlurmSnapshot(self._zone, self._renames, cluster_alias=self._asked.cluster)
            if not place and (
                names := list_unread_files(self._where, [path for path, _ in self._files])
            ):
                why = "left out, being no output of Slurm's that is read here"
                reading.notes.append(f"{why}: {abbreviate_names(names)}")
            told = [self._read(path, kind, reading) for path, kind in group]
            if self._is_zone_assumed and {kind for _, kind in group} & _LOCAL_KINDS:
                what = "text has no zones: its times are read as UTC"
                reading.notes.append(f"{what}; --option zone=NAME reads them in another")
            known = [moment for moment in (*told, reading.find_snapshot_time()) if moment]
            seen_s = max(known or [path.stat().st_mtime for path, _ in group])
            last = place + 1 == len(groups)
            for batch in split_batches(reading.build_rows(seen_s), self._asked, now, reading.notes):
                yield batch if last else batch._replace(cursor=None)

    def _read(self, path: Path, kind: str, reading: SlurmSnapshot) -> float | None:
        """Read one file and return when what it says held, where it says so."""
        told: float | None = None
        try:
            with _opened(path) as stream:
                if kind == "json":
                    told = reading.add_json(parse_json(stream.read()) or {})
                elif kind == "sacct":
                    records, notes = read_sacct(stream, str(path), self._zone)
                    reading.accounting_jobs.append(records)
                    reading.notes += notes
                elif kind == "scontrol":
                    reading.add_blocks(list(iter_blocks(stream.read().decode(errors="replace"))))
                elif kind == "events":
                    reading.node_events += nodes.read_events(stream, str(path), "", self._zone)
                elif kind == "sinfo":
                    reading.node_states += nodes.read_sinfo(stream, "")
                else:
                    lines = (line.decode(errors="replace") for line in stream)
                    reading.prolog_allocations += read_prolog_log(lines, "")
        except (EOFError, gzip.BadGzipFile, msgspec.DecodeError) as error:
            raise InputError([Problem(str(path), f"breaks off or is damaged: {error}")]) from error
        return told


def _opened(path: Path) -> BinaryIO:
    with path.open("rb") as stream:
        packed = stream.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.open(path)) if packed else path.open("rb")
