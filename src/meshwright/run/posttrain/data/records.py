"""Records of files: lines of JSON (gzipped or not), a JSON list, or rows of Parquet.

Each comes with where it stands, so that whoever refuses it can say so.
"""

import gzip
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.file_errors import convert_os_errors, require_plausible_rows
from meshwright.run.train.data.tokenization.bounded_gzip import open_bounded_gzip

_PARQUET = frozenset({".parquet", ".pq"})
_FIX = "give JSON lines (.jsonl, .jsonl.gz), a JSON list (.json) or Parquet"


class DataRecord(NamedTuple):
    """One object of a file."""

    source: str
    """File, and line or row, counted from 1."""
    values: dict[str, Any]


def read_records(paths: Sequence[str | Path]) -> Iterator[DataRecord]:
    """Yield the records of files one after the other; a folder's in the order of their names."""
    nothing = True
    for path in paths:
        for file in _files(Path(path)):
            for record in _rows(file) if file.suffix.lower() in _PARQUET else _lines(file):
                nothing = False
                yield record
    if nothing:
        fix = "put records there: one JSON object in each line, or rows of Parquet"
        raise InputError(Problem(str(path), "is empty: it holds no record", fix) for path in paths)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = [
        file
        for file in sorted(path.rglob("*"))
        if not {".json", ".jsonl", ".ndjson", *_PARQUET}.isdisjoint(file.suffixes)
    ]
    if not found:
        raise InputError([Problem(str(path), "is a folder without records", _FIX)])
    return found


def _lines(path: Path) -> Iterator[DataRecord]:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    try:
        with convert_os_errors(path, "read"), _open(path) as opened:
            for number, line in enumerate(opened, 1):
                text = line.removeprefix(b"\xef\xbb\xbf").strip()
                if number == 1 and text.startswith(b"["):
                    yield from _listed(path, text + opened.read())
                    return
                if not text:
                    continue
                where = f"{path}:{number}"
                try:
                    yield DataRecord(where, decode(text))
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                    raise InputError(
                        [Problem(where, f"is no JSON object: {error}", _FIX)]
                    ) from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        what = f"cannot read to its end: {error}"
        raise InputError([Problem(str(path), what, "copy the file again")]) from error


def _open(path: Path) -> Any:
    return open_bounded_gzip(path) if path.suffix == ".gz" else path.open("rb")


def _listed(path: Path, text: bytes) -> Iterator[DataRecord]:
    try:
        found = msgspec.json.decode(text, type=list[dict[str, Any]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError([Problem(str(path), f"is no list of objects: {error}", _FIX)]) from None
    for number, values in enumerate(found, 1):
        yield DataRecord(f"{path}: record {number}", values)


def _rows(path: Path) -> Iterator[DataRecord]:
    import pyarrow.parquet

    number = 0
    try:
        with convert_os_errors(path, "read"), pyarrow.parquet.ParquetFile(path) as file:
            require_plausible_rows(path, file.metadata)
            for batch in file.iter_batches(batch_size=1024):
                for values in batch.to_pylist():
                    number += 1
                    yield DataRecord(f"{path}: row {number}", values)
    except ValueError as error:  # Arrow's own errors are ValueErrors, as are ours
        if isinstance(error, InputError):
            raise
        what = f"is not a whole Parquet file: {str(error).splitlines()[0][:120]}"
        raise InputError([Problem(str(path), what, "copy or write the file again")]) from None
