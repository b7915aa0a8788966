"""Files of public traces as blocks of text columns, whatever they are packed in.

What a file is, is told by its first kilobytes and never by its name: tables with a header, tables
whose header lies beside them, Parquet, lists of JSON objects; plain, packed by gzip, or in an
archive of tar or zip.
Every value is read as text, since a column may hold numbers for a million rows and then `NA`.
"""

import csv
import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

import pyarrow as pa

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.file_errors import require_plausible_rows

_SNIFF_BYTES: Final = 1 << 18
"""The widest header known has two thousand columns in some ten kilobytes."""
_BLOCK_BYTES: Final = 16 << 20
_GZIP, _PICKLE, _ZIP, _PARQUET = b"\x1f\x8b", b"\x80", b"PK\x03\x04", b"PAR1"
_ROWS: Final = 200_000
"""Rows of a block of Parquet."""
_NULLS: Final = ["", "NA", "N/A", "NaN", "nan", "NULL", "null", "None", "NaT"]
_FAULTS = (
    pa.ArrowException, OSError, EOFError, zlib.error, tarfile.TarError, zipfile.BadZipFile,
    NotImplementedError, UnicodeError, RuntimeError,
)  # fmt: skip
_AGAIN = "copy it again from where it was published"
_FIXES: Final = {
    "invalid UTF8": "save it as UTF-8",
    "straddles two block boundaries": "shorten its rows: one is longer than 16 MiB",
}
"""What mends a file, by a word of what Arrow says."""


class TraceTable(NamedTuple):
    """One table of a trace: a file, or a member of an archive."""

    path: Path
    member: str
    """Its name in the archive; empty: the file itself."""
    kind: str
    """`csv`, `parquet`, `json` or `pickle`."""
    columns: tuple[str, ...]
    """Names of columns, or keys of the first object; empty where nothing tells them."""
    head_rows: tuple[tuple[str, ...], ...] = ()
    """The first few rows."""
    has_header: bool = True
    """Whether the names stand in the table's first line; else they lie beside it."""
    delimiter: str = ","
    """What stands between the fields of text."""

    @property
    def label(self) -> str:
        """Where it is, for people."""
        return f"{self.path}:{self.member}" if self.member else str(self.path)

    @property
    def stem(self) -> str:
        """Its name without folders and endings."""
        return Path(self.member or self.path).name.split(".")[0]

    @property
    def width(self) -> int:
        """How many fields a row has: rows with one more than the header end in a comma."""
        return max((len(row) for row in self.head_rows), default=len(self.columns))

    def with_columns(self, columns: tuple[str, ...]) -> "TraceTable":
        """Return it with names for columns that have none in the table."""
        return self._replace(columns=columns, has_header=False)

    def iter_blocks(
        self, wanted: Sequence[str] | None = None, skipped: list[int] | None = None
    ) -> Iterator[pa.Table]:
        """Read it block by block, some or all columns as text.

        Rows that have too many or too few fields are left out; how many fields each of them has is
        added to `skipped`.
        """
        self._refuse_repeated_columns()
        if self.kind == "parquet":
            yield from self._columnar(wanted)
            return
        from pyarrow import csv as arrow_csv

        def leave_out(row: Any) -> str:
            if skipped is not None:
                skipped.append(row.actual_columns)
            return "skip"

        names = list(self.columns)
        chosen = names if wanted is None else [name for name in wanted if name in names]
        filled = names + [f"_{place}" for place in range(self.width - len(names))]
        with _reading(self.label), open_table(self) as stream:
            reader = arrow_csv.open_csv(
                stream,
                arrow_csv.ReadOptions(
                    block_size=_BLOCK_BYTES, column_names=filled, skip_rows=int(self.has_header)
                ),
                arrow_csv.ParseOptions(
                    delimiter=self.delimiter,
                    newlines_in_values=True,
                    invalid_row_handler=leave_out,
                ),
                arrow_csv.ConvertOptions(
                    column_types=dict.fromkeys(filled, pa.string()),
                    strings_can_be_null=True,
                    null_values=_NULLS,
                    include_columns=chosen,
                ),
            )
            for batch in reader:
                yield pa.Table.from_batches([batch])

    def _refuse_repeated_columns(self) -> None:
        twice = sorted({name for name in self.columns if self.columns.count(name) > 1 and name})
        if twice:
            what = f"has {', '.join(twice[:3])} twice among its columns"
            raise InputError([Problem(self.label, what, "keep the one that is meant")])

    def _columnar(self, wanted: Sequence[str] | None) -> Iterator[pa.Table]:
        """Read blocks of Parquet, whose columns have types: they become text like all others."""
        from pyarrow import parquet

        chosen = [name for name in wanted or self.columns if name in self.columns]
        with _reading(self.label), parquet.ParquetFile(self.path) as file:
            require_plausible_rows(self.path, file.metadata)
            for batch in file.iter_batches(batch_size=_ROWS, columns=chosen):
                yield pa.table({name: _as_text(batch.column(name)) for name in chosen})

    def read_all(self, wanted: Sequence[str] | None = None) -> pa.Table:
        """Read all rows of some or all columns."""
        found = list(self.iter_blocks(wanted))
        return pa.concat_tables(found) if found else _empty(self.columns)

    def read_bytes(self) -> bytes:
        """Read its bytes."""
        with _reading(self.label), open_table(self) as stream:
            return cast(bytes, stream.read())


def find_tables(where: Path) -> Iterator[TraceTable]:
    """Find the tables of a file or of all files under a folder, in the order of their names."""
    if not where.exists():
        raise InputError([Problem(str(where), "there is no such file or folder")])
    files = [where] if where.is_file() else sorted(_files(where))
    for path in files:
        if path.suffix == ".header":
            continue
        with _reading(str(path)):
            yield from _of_file(path)


def _files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(name.startswith(".") for name in path.relative_to(folder).parts)
        if not hidden and not path.is_symlink() and path.is_file():
            yield path


def _of_file(path: Path) -> Iterator[TraceTable]:
    with path.open("rb") as raw:
        packed = raw.read(2) == _GZIP
    with _unpacked(path, packed) as stream:
        head = stream.read(_SNIFF_BYTES)
    if head[:4] == _PARQUET:
        yield _parquet(path)
    elif head[:4] == _ZIP:
        with zipfile.ZipFile(path) as packed_files:
            for info in packed_files.infolist():
                if not info.is_dir() and not _hidden(info.filename):
                    with packed_files.open(info) as inside:
                        yield from _sniffed(path, info.filename, inside.read(_SNIFF_BYTES))
    elif head[257:262] == b"ustar":
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                if member.isfile() and not _hidden(member.name):
                    inner = cast(IO[bytes], archive.extractfile(member)).read(_SNIFF_BYTES)
                    yield from _sniffed(path, member.name, inner)
    else:
        yield from _sniffed(path, "", head)


def _hidden(name: str) -> bool:
    """Say whether a member of an archive is what a Mac adds to it, or hidden otherwise."""
    return Path(name).name.startswith(".") or name.startswith("__MACOSX")


def _parquet(path: Path) -> TraceTable:
    from pyarrow import parquet

    return TraceTable(path, "", "parquet", tuple(parquet.read_schema(path).names))


def _as_text(column: pa.Array) -> pa.Array:
    try:
        return column.cast(pa.string())
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):  # Lists and the like tell nothing here.
        return pa.nulls(len(column), pa.string())


def _sniffed(path: Path, member: str, head: bytes) -> Iterator[TraceTable]:
    if head[:1] == _PICKLE:
        yield TraceTable(path, member, "pickle", ())
        return
    if b"\0" in head:
        return
    text = head.decode("utf-8-sig", "replace")
    if text.lstrip()[:1] in ("[", "{"):
        yield TraceTable(path, member, "json", ())
        return
    lines = text.splitlines()
    whole = lines if len(head) < _SNIFF_BYTES else lines[:-1]
    delimiter = _find_delimiter(whole[0] if whole else "")
    try:
        rows = csv.reader(io.StringIO("\n".join(whole[:20])), delimiter=delimiter)
        found = [tuple(row) for row in rows if row]
    except csv.Error:  # A text with fields longer than any table has.
        return
    if not found:
        return
    first = tuple(name.strip() for name in found[0])
    beside = _header_beside(path, member)
    if beside and len(beside) == len(first):
        yield TraceTable(path, member, "csv", beside, tuple(found), False, delimiter)
    else:
        yield TraceTable(path, member, "csv", first, tuple(found[1:]), delimiter=delimiter)


def _find_delimiter(header: str) -> str:
    """Return what stands between the names of a header; a comma where there are none."""
    if "," in header:
        return ","
    return max(";\t|", key=header.count) if any(mark in header for mark in ";\t|") else ","


def _header_beside(path: Path, member: str) -> tuple[str, ...]:
    """Return the names that a file `NAME.header` gives to the table of that name."""
    for name in (Path(member).name, path.name) if member else (path.name,):
        header = path.parent / f"{name.split('.')[0]}.header"
        if header.is_file():
            text = header.read_text(encoding="utf-8", errors="replace").strip()
            return tuple(column.strip() for column in text.split(","))
    return ()


@contextmanager
def open_table(part: TraceTable) -> Iterator[Any]:
    """Open the unpacked bytes of a part."""
    with part.path.open("rb") as raw:
        sign = raw.read(4)
    if part.member and sign == _ZIP:
        with zipfile.ZipFile(part.path) as packed_files, packed_files.open(part.member) as inside:
            yield inside
        return
    if part.member:
        with tarfile.open(part.path, "r:*") as archive:
            yield cast(IO[bytes], archive.extractfile(part.member))
        return
    packed = sign[:2] == _GZIP
    with _unpacked(part.path, packed) as stream:
        yield stream


@contextmanager
def _unpacked(path: Path, packed: bool) -> Iterator[IO[bytes]]:
    if packed:
        with gzip.open(path, "rb") as stream:
            yield cast(IO[bytes], stream)
    else:
        with path.open("rb") as plain:
            yield plain


@contextmanager
def _reading(label: str) -> Iterator[None]:
    try:
        yield
    except _FAULTS as error:
        fix = next((fix for word, fix in _FIXES.items() if word in str(error)), _AGAIN)
        raise DamagedFile([Problem(label, f"cannot read: {error}", fix)]) from None


def _empty(columns: tuple[str, ...]) -> pa.Table:
    return pa.table({name: pa.array([], pa.string()) for name in columns})
