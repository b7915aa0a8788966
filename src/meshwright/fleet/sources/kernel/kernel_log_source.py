"""Kernel logs: what dmesg, the journal, syslog and the fabric manager say of faults.

A source is a file or a folder of them: `dmesg`, `dmesg -T`, `dmesg --time-format iso`, /dev/kmsg,
`journalctl -k` in any of its usual forms or as JSON, /var/log/kern.log, fabricmanager.log. Where a
log does not name its node, the node is the file's name up to its first dot.
"""

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Final, NamedTuple, cast
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import pyarrow as pa

from meshwright.errors import InputError, Problem
from meshwright.fleet.sources.kernel.log_line import LogClock, parse_line
from meshwright.fleet.sources.kernel.messages import (
    KernelFault,
    normalize_pci_address,
    parse_device,
    parse_fault,
)
from meshwright.fleet.sources.source import RowBatch, SourceOptions, TelemetrySource, make_rows
from meshwright.spec.name_suggestions import build_unknown_name_problem

__all__ = ["OPTIONS", "matches", "open_source"]

OPTIONS: Final = {
    "node": "node that the log is of, where it does not say",
    "zone": "time zone of times that name none (default UTC)",
    "boot": "when the node started, for times since then: 2026-11-16T08:00+00:00",
    "gpus": "file of `nvidia-smi --query-gpu=index,pci.bus_id --format=csv,noheader` of the node",
}
"""What `--option NAME=VALUE` may say."""
_HEAD_LINES: Final = 200
_LONGEST: Final = 16_384
_KERNEL: Final = re.compile(
    r"^kern +:\w+ *: |\bkernel: |\bNVRM: |NVSwitch|^\[ *\d+\.\d{6}\] |^\d+,\d+,\d+,[^;]*;"
    r'|"_TRANSPORT" ?: ?"kernel"|^\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\] '
)
_MOST_TEXT: Final = 400


def matches(where: str) -> bool:
    """Say whether a file looks like a kernel's log, or a folder holds such files."""
    path = Path(where)
    if "://" in where or not path.exists():
        return False
    return any(_is_log(file) for file in _inside(path))


def open_source(where: str, asked: SourceOptions) -> TelemetrySource:
    """Open a file, or a folder of files."""
    unknown = [name for name in asked.kind_options if name not in OPTIONS]
    if unknown:
        raise InputError(
            [build_unknown_name_problem("option", name, OPTIONS, "--option") for name in unknown]
        )
    path = Path(where)
    if not path.exists():
        raise InputError([Problem(where, "there is no such file or folder")])
    if not asked.cluster:
        what, fix = "a kernel's log does not say of which cluster it is", "give --cluster NAME"
        raise InputError([Problem(where, what, fix)])
    files = [file for file in _inside(path) if path.is_file() or _is_log(file)]
    if not files:
        raise InputError([Problem(where, "holds no log of a kernel")])
    return KernelLogSource(path.absolute(), files, asked)


class _Key(NamedTuple):
    node: str
    gpu: int | None
    time_s: float
    kind: str
    code: int | None


class KernelLogSource:
    """Logs of nodes; those that have not changed since are not read again."""

    def __init__(self, place: Path, files: list[Path], asked: SourceOptions) -> None:
        self.name = f"kernel {place}"
        self._files, self._asked = files, asked
        self._zone = _zone(asked.kind_options.get("zone", "UTC"))
        self._boot_s = _boot(asked.kind_options.get("boot", ""))
        self._gpus = _gpus(asked.kind_options.get("gpus", ""))

    def read_batches(self, cursor: str | None = None) -> Iterator[RowBatch]:
        """Give the faults that new or changed files tell of."""
        done: dict[str, str] = json.loads(cursor) if cursor else {}
        for file in self._files:
            state = file.stat()
            mark = f"{state.st_size} {state.st_mtime_ns}"
            if done.get(file.name) == mark:
                continue
            done[file.name] = mark
            clock = LogClock(self._zone, state.st_mtime, self._boot_s)
            rows, notes = self._read(file, clock)
            yield RowBatch("events", rows, json.dumps(done), notes)

    def _read(self, file: Path, clock: LogClock) -> tuple[pa.Table, tuple[str, ...]]:
        named = self._asked.kind_options.get("node", "") or file.name.partition(".")[0]
        devices: dict[tuple[str, str], str] = {}
        found: dict[_Key, list[KernelFault]] = {}
        untimed, unnamed = 0, False
        with _opened(file) as stream:
            for text in _short_lines(stream):
                line = parse_line(text, clock)
                if line is None:
                    continue
                node = line.node or named
                which = parse_device(line.text)
                if which:
                    devices[node, which[0]] = which[1]
                told = parse_fault(line.text)
                if told is None:
                    continue
                if line.time_s is None:
                    untimed += 1
                    continue
                if not self._is_wanted(line.time_s):
                    continue
                unnamed |= not line.node and "node" not in self._asked.kind_options
                key = _Key(
                    node, self._gpus.get(told.pci_address), line.time_s, told.kind, told.code
                )
                found.setdefault(key, []).append(told)
        notes = []
        if untimed:
            notes.append(
                f"{file.name}: {untimed} faults have times since the node started only; say when "
                "that was: --option boot=2026-11-16T08:00+00:00"
            )
        if unnamed:
            notes.append(f"{file.name} names no node; taken for {named} (else --option node=NAME)")
        return _table(found, devices, self._asked.cluster), tuple(notes)

    def _is_wanted(self, time_s: float) -> bool:
        since_s, until_s = self._asked.since_s, self._asked.until_s
        return (since_s is None or time_s >= since_s) and (until_s is None or time_s < until_s)


def _table(
    found: dict[_Key, list[KernelFault]], devices: dict[tuple[str, str], str], cluster: str
) -> pa.Table:
    """Make a row of each moment: two lines of one second and kind are one row, which counts two."""
    keys = list(found)
    return make_rows(
        "events",
        {
            "cluster": pa.array([cluster] * len(keys), pa.string()),
            "node": pa.array([key.node for key in keys], pa.string()),
            "gpu": pa.array([key.gpu for key in keys], pa.int32()),
            "time_s": pa.array([key.time_s for key in keys], pa.float64()),
            "kind": pa.array([key.kind for key in keys], pa.string()),
            "code": pa.array([key.code for key in keys], pa.int32()),
            "count": pa.array([float(len(found[key])) for key in keys], pa.float64()),
            "text": pa.array([_text(key.node, found[key], devices) for key in keys], pa.string()),
        },
    )


def _text(node: str, told: list[KernelFault], devices: dict[tuple[str, str], str]) -> str:
    """Name the devices first, then what was said of the first of them."""
    places = sorted({one.pci_address for one in told if one.pci_address})
    names = [f"{pci} {devices.get((node, pci), '')}".strip() for pci in places]
    # Of several lines the gravest words count; sorted, so that order does not matter.
    grave = sorted({one.text for one in told}, key=lambda text: ("non" in text.lower(), text))
    text = " | ".join(grave[:3])
    return (f"{', '.join(names)}: {text}" if names else text)[:_MOST_TEXT]


def _inside(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.iterdir() if file.is_file())


def _is_log(file: Path) -> bool:
    try:
        with _opened(file) as stream:
            lines = [
                line for line, _ in zip(_short_lines(stream), range(_HEAD_LINES), strict=False)
            ]
    except (OSError, EOFError, zlib.error):
        return False
    if any("\0" in line for line in lines):
        return False
    clock = LogClock(boot_s=0.0, written_s=4e9)
    return any(_KERNEL.search(line) and parse_line(line, clock) for line in lines)


def _opened(file: Path) -> IO[str]:
    if file.suffix == ".gz":
        return TextIOWrapper(cast(IO[bytes], gzip.open(file)), encoding="utf-8", errors="replace")
    return file.open(encoding="utf-8", errors="replace")


def _short_lines(stream: IO[str]) -> Iterator[str]:
    """Give lines without their ends; of one without end only the first part."""
    inside = False
    while piece := stream.readline(_LONGEST):
        if not inside:
            yield piece.rstrip("\r\n")
        inside = not piece.endswith("\n")


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        what, fix = f"{name!r} is no time zone", "write one as Europe/Berlin, or UTC"
        raise InputError([Problem("--option zone", what, fix)]) from None


def _boot(text: str) -> float | None:
    if not text:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        what, fix = f"{text!r} is no moment", "write 2026-11-16T08:00+00:00"
        raise InputError([Problem("--option boot", what, fix)]) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _gpus(path: str) -> dict[str, int]:
    """Read which index is at which address."""
    if not path:
        return {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        pairs = [line.split(",") for line in lines if line.strip()]
        return {normalize_pci_address(pci.strip()): int(index) for index, pci in pairs}
    except (OSError, ValueError) as error:
        fix = "nvidia-smi --query-gpu=index,pci.bus_id --format=csv,noheader > FILE"
        raise InputError([Problem(path, f"names no GPUs: {error}", fix)]) from None
