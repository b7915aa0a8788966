"""Documents of text in files: JSON lines, Parquet, plain text; the first and last also gzipped.

Work is handed out as `TextSlice`s of files that can be read independently of each other: a range of
bytes of JSON lines, some row groups of a Parquet file, or a whole file. A damaged document comes
out as a `Problem` in its place, so that the reader decides whether to go on.
"""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.file_errors import convert_os_errors, require_plausible_rows
from meshwright.run.train.data.tokenization.bounded_gzip import open_bounded_gzip

JSONL_SUFFIXES = frozenset({".jsonl", ".ndjson", ".json"})
PARQUET_SUFFIXES = frozenset({".parquet", ".pq"})
PLAIN_TEXT_SUFFIXES = frozenset(
    (".txt", ".text", ".md", ".rst", ".tex", ".html", ".xml", ".csv", ".toml", ".yaml", ".yml",
     ".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".rb",
     ".sh", ".sql")
)  # fmt: skip
"""Endings that are text where a whole folder is given; a file that is named may have any."""
_GZIP_FACTOR = 4
"""Text is about so many times larger than its gzip; only used to spread work evenly."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UNREADABLE = (EOFError, gzip.BadGzipFile, zlib.error, OSError)


class TextSlice(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a file that is read on its own."""

    path: str
    start: int = 0
    """First byte of JSON lines, or first row group of Parquet."""
    stop: int | None = None
    """Where the next slice begins; None reads to the end."""
    size_bytes: int = 0
    """About how much text it holds."""


def detect_text_format(path: Path) -> str:
    """Return `lines`, `parquet` or `plain`, by the ending."""
    ending = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    if ending.lower() in JSONL_SUFFIXES:
        return "lines"
    return "parquet" if path.suffix.lower() in PARQUET_SUFFIXES else "plain"


def list_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files of text that paths stand for, a folder's in the order of their names."""
    found: list[Path] = []
    problems = []
    for path in paths:
        if path.is_dir():
            inside = [one for one in sorted(path.rglob("*")) if _is_text(one, path)]
            if not inside:
                what = "is a folder without files of text"
                problems.append(Problem(str(path), what, "name the files themselves"))
            found += inside
        elif path.exists():
            found.append(path)
        else:
            problems.append(Problem(str(path), "there is no such file or folder", ""))
    if problems:
        raise InputError(problems)
    return found


def _is_text(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    if hidden or not path.is_file():
        return False
    ending = path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix
    return ending.lower() in JSONL_SUFFIXES | PARQUET_SUFFIXES | PLAIN_TEXT_SUFFIXES


def split_file(path: Path, most_bytes: int) -> list[TextSlice]:
    """Cut a file into slices of about so many bytes, where it can be cut."""
    with convert_os_errors(path, "read"):
        size = path.stat().st_size
    kind = detect_text_format(path)
    if kind == "parquet":
        return _row_groups(path, most_bytes)
    if path.suffix == ".gz":
        return [TextSlice(path=str(path), size_bytes=size * _GZIP_FACTOR)]
    if kind == "plain" or size <= most_bytes:
        return [TextSlice(path=str(path), size_bytes=size)]
    cuts = [*range(0, size, most_bytes), size]
    return [
        TextSlice(path=str(path), start=start, stop=stop, size_bytes=stop - start)
        for start, stop in pairwise(cuts)
    ]


def read_documents(part: TextSlice, field: str) -> Iterator[str | Problem]:
    """Yield the documents of a slice."""
    path = Path(part.path)
    kind = detect_text_format(path)
    if kind == "parquet":
        yield from _rows(part, field)
        return
    try:
        with _open(path) as opened:
            if kind == "lines":
                yield from _lines(opened, part, field)
            else:
                yield _whole(opened.read(), path)
    except _UNREADABLE as error:
        yield Problem(str(path), f"cannot read to its end: {error}", "copy the file again")


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return open_bounded_gzip(path)
    return path.open("rb", buffering=1 << 20)


def _whole(data: bytes, path: Path) -> str | Problem:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text (byte {error.start:,})"
        return Problem(str(path), what, "convert it to UTF-8, or leave the file out")


def _lines(opened: BinaryIO, part: TextSlice, field: str) -> Iterator[str | Problem]:
    """Yield the text of the lines that begin within the slice."""
    line_type = msgspec.defstruct("Line", [("text", str)], rename={"text": field})
    decode = msgspec.json.Decoder(line_type).decode
    at = part.start
    if at:
        # The line that runs across the cut belongs to the slice before.
        opened.seek(at - 1)
        at += len(opened.readline()) - 1
    for line in opened:
        if part.stop is not None and at >= part.stop:
            return
        if not line.isspace():
            try:
                found: Any = decode(line.removeprefix(_BYTE_ORDER_MARK) if not at else line)
                yield found.text
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                what = f"the line at byte {at:,} is not an object with a text {field!r}: {error}"
                yield Problem(part.path, what, _mended(line))
        at += len(line)


def _row_groups(path: Path, most_bytes: int) -> list[TextSlice]:
    sizes = []
    try:
        metadata = _parquet().ParquetFile(path).metadata
        require_plausible_rows(path, metadata)
        sizes = [metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups)]
    except InputError:
        raise
    except (OSError, ValueError) as error:  # Arrow's own errors are ValueErrors
        raise InputError([_bad_parquet(path, error)]) from None
    found: list[TextSlice] = []
    first = held = 0
    for number, size in enumerate(sizes):
        held += size
        if held >= most_bytes or number == len(sizes) - 1:
            found.append(TextSlice(path=str(path), start=first, stop=number + 1, size_bytes=held))
            first, held = number + 1, 0
    return found


def _mended(line: bytes) -> str:
    """Say what to do about a line without the field asked for: which others hold text."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        found = None
    values = found.items() if isinstance(found, dict) else ()
    names = [name for name, value in values if isinstance(value, str)][:8]
    if not names:
        return "mend or remove the line, or name another field"
    hold = "holds" if len(names) == 1 else "hold"
    return f"name another field ({', '.join(names)} {hold} text), or mend or remove the line"


def _rows(part: TextSlice, field: str) -> Iterator[str | Problem]:
    path = Path(part.path)
    try:
        with _parquet().ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                what = f"has no column {field!r}"
                yield Problem(part.path, what, f"name one of {', '.join(names[:8])}")
                return
            stop = file.metadata.num_row_groups if part.stop is None else part.stop
            groups = list(range(part.start, stop))
            for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=[field]):
                for text in batch.column(0).to_pylist():
                    if isinstance(text, str):
                        yield text
                    elif text is not None:
                        what = f"column {field!r} holds {type(text).__name__}, not text"
                        yield Problem(part.path, what, "name a column of text")
                        return
    except (OSError, ValueError) as error:
        yield _bad_parquet(path, error)


def _bad_parquet(path: Path, error: Exception) -> Problem:
    what = f"is not a whole Parquet file: {str(error).splitlines()[0][:120]}"
    return Problem(str(path), what, "copy or write the file again")


def _parquet() -> Any:
    import pyarrow.parquet

    return pyarrow.parquet
