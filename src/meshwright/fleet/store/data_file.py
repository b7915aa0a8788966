"""One Parquet file of the store: how it is written, and how it is read."""

import hashlib
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from meshwright.errors import DamagedFile, Problem
from meshwright.file_errors import require_plausible_rows
from meshwright.fleet.store.schema import SCHEMAS, SPAN_COLUMNS

ROW_GROUP_SIZE = 131_072
_LOOKED_AT = 20_000
_FEW = 0.2
"""Below this share of different values a dictionary takes less room than the values."""


class DataFile(NamedTuple):
    """A file of rows of one table and cluster."""

    table: str
    cluster: str
    bucket: int
    """Start of the stretch of time that its rows are of, in seconds; in tables of what lasts, which
    in turn the file was written."""
    file: str
    """Path under the store's folder."""
    rows: int
    size_bytes: int
    first_s: float
    last_s: float
    known_s: float
    """The last moment that any row names; less than `last_s` where something goes on."""
    first_node: str
    """First and last node of its rows, by name."""
    last_node: str
    rollup_of: str = ""
    """The file of samples that these windows were rolled up from."""
    schema_fingerprint: str = ""
    """Which columns it has: tables gain some as time goes by, and files stay as they were."""

    def may_overlap(self, other: "DataFile") -> bool:
        """Say whether rows of both may have the same key, going by times and names of nodes."""
        return (
            self.first_s <= other.last_s
            and other.first_s <= self.last_s
            and self.first_node <= other.last_node
            and other.first_node <= self.last_node
        )


def describe_rows(table: str, cluster: str, bucket: int, rows: pa.Table) -> DataFile:
    """Describe rows that have no file yet."""
    first, last = SPAN_COLUMNS.get(table, ("time_s", "time_s"))
    begin = pc.min(rows[first]).as_py()
    # What has not ended lasts: only a bound that every row has is one.
    end = None if rows[last].null_count else pc.max(rows[last]).as_py()
    if rows[first].null_count:
        begin = None
    named = [pc.max(rows[name]).as_py() for name in {first, last}]
    known = max((moment for moment in named if moment is not None), default=float("-inf"))
    nodes = pc.min_max(rows["node"]).as_py() if "node" in rows.column_names else {}
    return DataFile(
        table, cluster, bucket, "", rows.num_rows, 0,
        float("-inf") if begin is None else begin, float("inf") if end is None else end, known,
        nodes.get("min") or "", nodes.get("max") or "",
    )  # fmt: skip


def write_file(folder: Path, part: DataFile, rows: pa.Table) -> DataFile:
    """Write rows to a new file that is on disk when this returns, readable by its owner only."""
    place = Path(part.table, f"cluster={quote(part.cluster, safe='') or '_'}")
    if "time_s" in rows.column_names:
        day = np.datetime64(part.bucket, "s").astype("datetime64[D]")
        place /= f"day={day}"
    file = place / f"{part.bucket}-{uuid.uuid4().hex}.parquet"
    path = folder / file
    for above in reversed(path.parents):
        if folder in above.parents and not above.exists():
            above.mkdir(mode=0o700, exist_ok=True)
            _to_disk(above.parent)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "wb") as out:
        dictionary, split = _encodings(rows)
        pq.write_table(
            rows, out, row_group_size=ROW_GROUP_SIZE, compression="zstd", compression_level=1,
            use_dictionary=dictionary, use_byte_stream_split=split, store_schema=False,
        )  # fmt: skip
        out.flush()
        os.fsync(out.fileno())
        size = out.tell()
    _to_disk(path.parent)
    fingerprint = compute_schema_fingerprint(rows.schema)
    return part._replace(file=str(file), size_bytes=size, schema_fingerprint=fingerprint)


def choose_compaction(parts: Sequence[DataFile], rows: int, most: int) -> list[DataFile]:
    """Return the smallest files, to be made into one together with some new rows.

    A file much larger than all smaller ones together stays as it is, unless there would still be
    `most` of them: so each row is written again only as often as its file can double.
    """
    chosen: list[DataFile] = []
    for part in sorted(parts, key=lambda one: one.rows):
        if part.rows > 2 * rows and len(parts) - len(chosen) < most:
            break
        chosen.append(part)
        rows += part.rows
    return chosen


def choose_tail_compaction(parts: Sequence[DataFile], most: int) -> list[DataFile]:
    """Return the last files in order of their turns, likewise: versions go by turns."""
    count, rows = 1, parts[-1].rows
    while count < len(parts):
        before = parts[-count - 1]
        if before.rows > 2 * rows and len(parts) - count < most:
            break
        count, rows = count + 1, rows + before.rows
    return list(parts[-count:])


def compute_schema_fingerprint(schema: pa.Schema) -> str:
    """Return a short name for the columns of a schema."""
    columns = ";".join(f"{field.name} {field.type}" for field in schema)
    return hashlib.blake2b(columns.encode(), digest_size=6).hexdigest()


def read_column_names(folder: Path, part: DataFile) -> list[str]:
    """Return the columns that a file has."""
    with _reading(folder / part.file):
        found: list[str] = pq.read_schema(folder / part.file).names
    return found


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what Arrow raises of a damaged file into an error that names it."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeError, KeyError) as error:
        what = f"is damaged: {(str(error).splitlines() or [type(error).__name__])[0]}"
        fix = "bring it back from a copy, or ingest into a new store"
        raise DamagedFile([Problem(str(path), what, fix)]) from None


def _to_disk(folder: Path) -> None:
    """Have the names in a folder outlast a loss of power, as their files do."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _encodings(rows: pa.Table) -> tuple[list[str], list[str]]:
    """Return the columns kept by a dictionary, and floats whose bytes are kept apart.

    Percentages and clocks have few values; shares of cycles have as many as there are samples, and
    of these the leading bytes are alike.
    """
    step = max(1, rows.num_rows // _LOOKED_AT)
    seen = rows.take(np.arange(0, rows.num_rows, step)) if step > 1 else rows
    dictionary: list[str] = []
    split: list[str] = []
    for field in rows.schema:
        if pa.types.is_floating(field.type):
            column = seen[field.name]
            few = pc.count_distinct(column, mode="all").as_py() <= _FEW * len(column)
            (dictionary if few else split).append(field.name)
        elif not pa.types.is_nested(field.type):
            dictionary.append(field.name)
        else:
            # The name of a column of Parquet's is a path; that of a list ends in its element.
            dictionary.append(f"{field.name}.list.element")
    return dictionary, split


def read_file(folder: Path, part: DataFile, columns: list[str] | None = None) -> pa.Table:
    """Read the rows of a file, or some columns of them; those it does not have are unknown."""
    schema = SCHEMAS[part.table]
    asked = schema.names if columns is None else columns
    with _reading(folder / part.file):
        with pq.ParquetFile(folder / part.file) as file:
            require_plausible_rows(folder / part.file, file.metadata)
            there = file.schema_arrow.names
            rows: pa.Table = file.read([name for name in asked if name in there])
        filled = [
            rows[name] if name in there else pa.nulls(rows.num_rows, schema.field(name).type)
            for name in asked
        ]
        return pa.table(filled, schema=pa.schema([schema.field(name) for name in asked]))
