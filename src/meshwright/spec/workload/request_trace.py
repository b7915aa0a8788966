"""Recorded requests in files: CSV and JSON lines, read row by row, whatever tool wrote them.

| rows | arrival | prompt | answer | prefix |
| --- | --- | --- | --- | --- |
| Azure LLM inference, CSV | `TIMESTAMP` | `ContextTokens` | `GeneratedTokens` | – |
| vidur, CSV | `arrived_at` or none | `num_prefill_tokens` | `num_decode_tokens` | – |
| Mooncake, JSON lines | `timestamp` (ms) | `input_length` | `output_length` | `hash_ids` |
| ours, both | `arrival_s` or none | `prompt_tokens` | `output_tokens` | `prefix_blocks` (JSON) |

A damaged file raises `DamagedFile`, which names the first bad lines and keeps the good rows.
"""

import csv
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.file_errors import make_parent_folder
from meshwright.spec.field_checks import check_number
from meshwright.spec.serialization import format_value
from meshwright.spec.workload.lengths import MAX_TOKENS
from meshwright.spec.workload.requests import BLOCK_TOKENS, WorkloadRequest

_SHOWN_PROBLEMS = 10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MEND_ROW = "mend the row, or leave it out"


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """Requests as they were recorded, in order of arrival."""

    requests: tuple[WorkloadRequest, ...]
    """The requests."""
    has_times: bool = True
    """Whether the arrival times were recorded; without them all arrive at zero."""

    def scale_to_rate(self, rate_per_s: float) -> "RequestTrace":
        """Return the trace with its time stretched to a mean rate; bursts stay in proportion."""
        problems = check_number("rate_per_s", rate_per_s, 1e-9, 1e9)
        if not self.has_times or len(self.requests) < 2 or not self._span_s() > 0:
            fix = "draw arrival times with fit, or read a trace that records them"
            problems.append(Problem("trace", "has no arrival times to stretch", fix))
        if problems:
            raise InputError(problems)
        factor = (len(self.requests) - 1) / (self._span_s() * rate_per_s)
        start = self.requests[0].arrival_s
        stretched = (
            msgspec.structs.replace(request, arrival_s=(request.arrival_s - start) * factor)
            for request in self.requests
        )
        return RequestTrace(requests=tuple(stretched))

    def _span_s(self) -> float:
        return self.requests[-1].arrival_s - self.requests[0].arrival_s


class _Row(NamedTuple):
    """One row of a file: its request, or what is wrong with it."""

    line: int
    request: WorkloadRequest | None = None
    timed: bool = True
    problem: str = ""


def read_requests(path: str | Path) -> RequestTrace:
    """Read a request trace in any known form; the form is found from the contents."""
    path = Path(path)
    if path.is_dir() or path.name.startswith("chunk-"):
        what = "holds client models, not requests"
        raise InputError([Problem(str(path), what, "read it with read_clients and draw from it")])
    try:
        with path.open("rb") as file:
            is_json = file.read(4096).removeprefix(_BYTE_ORDER_MARK).lstrip().startswith(b"{")
            file.seek(0)
            if is_json:
                return _collect(path, _json_rows(file))
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as text:
            return _collect(path, _csv_rows(path, text))
    except FileNotFoundError:
        raise InputError([Problem(str(path), "there is no such file", "check the path")]) from None
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        what = f"cannot read: {getattr(error, 'strerror', None) or error}"
        raise InputError([Problem(str(path), what, "give a file that you may read")]) from None


def write_requests(requests: Iterable[WorkloadRequest], path: str | Path) -> int:
    """Write requests in our own form, CSV or JSON lines by the file's ending; return how many."""
    path = Path(path)
    if path.suffix not in (".csv", ".jsonl"):
        what = f"unknown ending {path.suffix!r}"
        raise InputError([Problem(str(path), what, "use .csv or .jsonl")])
    line_of = _csv_line if path.suffix == ".csv" else msgspec.json.encode
    written = 0
    make_parent_folder(path)
    try:
        with path.open("wb") as file:
            if path.suffix == ".csv":
                file.write(b"arrival_s,prompt_tokens,output_tokens\n")
            for request in requests:
                file.write(line_of(request) + b"\n")
                written += 1
    except OSError as error:
        what = f"cannot write: {error.strerror}"
        fix = "give a path that you may write to"
        raise InputError([Problem(str(path), what, fix)]) from None
    return written


def _csv_line(request: WorkloadRequest) -> bytes:
    if request.prefix_blocks:
        what = "CSV has no column for the shared prefixes of these requests"
        raise InputError([Problem("path", what, "use the ending .jsonl")])
    cells = (request.arrival_s, request.prompt_tokens, request.output_tokens)
    return ",".join(map(repr, cells)).encode()


def _collect(path: Path, rows: Iterable[_Row]) -> RequestTrace:
    """Gather the good rows in order of arrival, or raise with the bad ones listed."""
    good: list[WorkloadRequest] = []
    problems: list[Problem] = []
    bad, timed = 0, None
    for row in rows:
        problem = row.problem
        if row.request is not None and timed is not None and row.timed is not timed:
            problem = "has an arrival time in some rows only"
        if row.request is None or problem:
            bad += 1
            if bad <= _SHOWN_PROBLEMS:
                problems.append(Problem(f"{path}:{row.line}", problem, _MEND_ROW))
            continue
        timed = row.timed
        good.append(row.request)
    good.sort(key=lambda request: request.arrival_s)
    trace = RequestTrace(requests=tuple(_from_zero(good)), has_times=timed is not False)
    if bad > _SHOWN_PROBLEMS:
        what = f"{bad - _SHOWN_PROBLEMS} more rows cannot be read"
        problems.append(Problem(str(path), what, "mend the rows above first, and read it again"))
    if problems:
        raise DamagedFile(problems, kept=trace)
    if not good:
        fix = "give a trace with at least one row"
        raise DamagedFile([Problem(str(path), "holds no requests", fix)], kept=trace)
    return trace


def _from_zero(requests: list[WorkloadRequest]) -> list[WorkloadRequest]:
    """Move requests that are timed from the first row so that the earliest comes at zero."""
    if not requests or requests[0].arrival_s >= 0:
        return requests
    start = requests[0].arrival_s
    replace = msgspec.structs.replace
    return [replace(request, arrival_s=request.arrival_s - start) for request in requests]


class _Columns(NamedTuple):
    """The columns of one CSV form and how it writes times."""

    arrival: str | None
    prompt: str
    output: str

    @property
    def needed(self) -> set[str]:
        return {name for name in self if name is not None}


_CSV_FORMS = (
    _Columns("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    _Columns("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    _Columns(None, "num_prefill_tokens", "num_decode_tokens"),
    _Columns("arrival_s", "prompt_tokens", "output_tokens"),
    _Columns(None, "prompt_tokens", "output_tokens"),
)


def _csv_rows(path: Path, text: IO[str]) -> Iterator[_Row]:
    reader = csv.reader(text)
    header = [name.strip() for name in _next_cells(reader) or []]
    form = next((form for form in _CSV_FORMS if form.needed <= set(header)), None)
    if form is None:
        known = "; ".join(",".join(sorted(form.needed)) for form in _CSV_FORMS)
        what = f"no known columns in {format_value(','.join(header))}"
        raise InputError([Problem(f"{path}:1", what, f"known are {known}")])
    places = [header.index(name) for name in (form.prompt, form.output)]
    when = header.index(form.arrival) if form.arrival else None
    clock = _wall_clock() if form.arrival == "TIMESTAMP" else _number
    while (cells := _next_cells(reader)) is not None:
        if not cells:
            continue
        line = reader.line_num
        try:
            prompt, output = (_count(cells[place]) for place in places)
            arrival = clock(cells[when]) if when is not None else 0.0
            request = _request(arrival, prompt, output)
        except IndexError:
            what = f"has {len(cells)} columns, not {len(header)}"
            yield _Row(line, problem=what)
        except (ValueError, OverflowError) as error:
            yield _Row(line, problem=str(error))
        else:
            yield _Row(line, request, timed=when is not None)


def _next_cells(reader: Any) -> list[str] | None:
    """Return the next row; a row that CSV itself cannot take apart comes back as one cell."""
    try:
        cells: list[str] = next(reader)
    except StopIteration:
        return None
    except csv.Error as error:
        return [f"({error})"]
    return cells


def _wall_clock() -> Callable[[str], float]:
    """Return a reader of dates that counts seconds from the first date it is given."""
    origin: list[datetime] = []

    def seconds(text: str) -> float:
        try:
            date = datetime.fromisoformat(text.strip())
        except ValueError:
            raise ValueError(f"{format_value(text)} is not a date and time") from None
        date = date if date.tzinfo else date.replace(tzinfo=UTC)
        origin[:] = origin or [date]
        return (date - origin[0]).total_seconds()

    return seconds


def _json_rows(lines: IO[bytes]) -> Iterator[_Row]:
    decode = msgspec.json.Decoder().decode
    for number, raw in enumerate(lines, start=1):
        line = raw.removeprefix(_BYTE_ORDER_MARK).strip()
        if not line:
            continue
        try:
            row = decode(line)
            if not isinstance(row, dict):
                raise ValueError(f"{format_value(row)} is not an object")
            request = _mooncake(row) if "input_length" in row else _own(row)
        except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
            yield _Row(number, problem=str(error))
        else:
            yield _Row(number, request, timed="timestamp" in row or "arrival_s" in row)


def _mooncake(row: dict[str, Any]) -> WorkloadRequest:
    return _request(
        _seconds(row, "timestamp") / 1000,
        _count(row["input_length"]),
        _count(_value(row, "output_length")),
        _blocks(row.get("hash_ids", [])),
    )


def _own(row: dict[str, Any]) -> WorkloadRequest:
    return _request(
        _seconds(row, "arrival_s") if "arrival_s" in row else 0.0,
        _count(_value(row, "prompt_tokens")),
        _count(_value(row, "output_tokens")),
        _blocks(row.get("prefix_blocks", [])),
        _count(row.get("block_tokens", BLOCK_TOKENS)),
    )


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{format_value(text)} is not a number") from None


def _value(row: dict[str, Any], name: str) -> object:
    if name not in row:
        raise ValueError(f"has no {name!r}, only {format_value(', '.join(row))}")
    return row[name]


def _seconds(row: dict[str, Any], name: str) -> float:
    value = _value(row, name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} {format_value(value)} is not a number")
    return float(value)


def _count(value: object) -> int:
    """Read a number of tokens from a cell or a JSON value."""
    number = _number(value) if isinstance(value, str) else value
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    if type(number) is int:
        return number
    raise ValueError(f"{format_value(value)} is not a number of tokens")


def _blocks(value: object) -> tuple[int, ...]:
    if isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    raise ValueError(f"{format_value(value)} is not a list of block ids")


def _request(
    arrival_s: float,
    prompt: int,
    output: int,
    blocks: tuple[int, ...] = (),
    block_tokens: int = BLOCK_TOKENS,
) -> WorkloadRequest:
    """Build a request from numbers that were read, or raise `ValueError` with what is off."""
    if not abs(arrival_s) <= 1e12:
        raise ValueError(f"arrival {arrival_s!r} is out of range")
    if not 1 <= prompt <= MAX_TOKENS:
        raise ValueError(f"a prompt of {prompt} tokens is out of range")
    if not 0 <= output <= MAX_TOKENS:
        raise ValueError(f"an answer of {output} tokens is out of range")
    if not 1 <= block_tokens <= MAX_TOKENS:
        raise ValueError(f"a block of {block_tokens} tokens is out of range")
    if len(blocks) > -(-prompt // block_tokens):
        raise ValueError(f"{len(blocks)} blocks of {block_tokens} do not fit {prompt} tokens")
    return WorkloadRequest(
        arrival_s=arrival_s,
        prompt_tokens=prompt,
        output_tokens=output,
        prefix_blocks=blocks,
        block_tokens=block_tokens,
    )
