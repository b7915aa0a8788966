"""What the store holds: files, cursors and horizons, in one SQLite file beside the Parquet files.

A file of rows counts only once it stands here, and what one `put` writes comes to stand here in a
single transaction. A process that is killed leaves either what was there before, or all of it.
"""

import fcntl
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from meshwright.errors import InputError, Problem
from meshwright.fleet.store.data_file import DataFile

FORMAT_VERSION = 3
MANIFEST_FILE = "manifest.sqlite"
_OLDER_FILE = "catalog.sqlite"
_UPGRADE_FIX = "use the version that made it, or ingest again into another folder"
DELETION_GRACE_S = 600.0
"""Files let go stay this long, for those who have just been told to read them."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS data_file (
    "table" TEXT NOT NULL, cluster TEXT NOT NULL, bucket INTEGER NOT NULL, file TEXT PRIMARY KEY,
    rows INTEGER NOT NULL, size_bytes INTEGER NOT NULL, first_s REAL NOT NULL, last_s REAL NOT NULL,
    known_s REAL NOT NULL, first_node TEXT NOT NULL, last_node TEXT NOT NULL,
    rollup_of TEXT NOT NULL, schema_fingerprint TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS data_file_bucket ON data_file ("table", cluster, bucket);
CREATE INDEX IF NOT EXISTS data_file_rollup_of ON data_file (rollup_of);
CREATE TABLE IF NOT EXISTS gone (file TEXT PRIMARY KEY, at_s REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS cursor (source TEXT PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS superseded (
    "table" TEXT NOT NULL, cluster TEXT NOT NULL, rows INTEGER NOT NULL,
    PRIMARY KEY ("table", cluster)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS horizon ("table" TEXT PRIMARY KEY, since_s REAL NOT NULL) WITHOUT ROWID;
"""
_CONTRIBUTIONS = """
CREATE TABLE IF NOT EXISTS contribution (
    source TEXT NOT NULL, cluster TEXT NOT NULL, PRIMARY KEY (source, cluster)
) WITHOUT ROWID
"""
_COLUMNS = ", ".join(f'"{name}"' for name in DataFile._fields)


class Manifest:
    """The list of what is kept."""

    def __init__(self, folder: Path, *, create: bool) -> None:
        self.folder = folder
        self._path = folder / MANIFEST_FILE
        _refuse_older_store(folder)
        # One that is yet to be made is made with its first row: who fails before leaves nothing.
        self._to_be_made = create and not self._path.is_file()
        if self._to_be_made:
            _require_room(folder)
            self._link = _connected(":memory:")
        elif self._path.is_file():
            self._link = _connected(self._path)
        else:
            fix = "mw fleet ingest makes one, or name another with --store"
            raise InputError([Problem(str(folder), "there is no fleet store here", fix)])

    def _made(self) -> None:
        if self._to_be_made:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # SQLite gives its journals the mode of this file.
            os.close(os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600))
            self._link.close()
            self._link = _connected(self._path)
            self._to_be_made = False

    def close(self) -> None:
        """Let go of the file."""
        self._link.close()

    @contextmanager
    def lock_for_writing(self) -> Iterator[None]:
        """Be the only one who writes; whoever else wants to waits. A killed process lets go."""
        self._made()
        handle = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def list_files(
        self, table: str, cluster: str | None = None, bucket: int | None = None
    ) -> list[DataFile]:
        """Return the files of a table, in order of time."""
        query, values = f'SELECT {_COLUMNS} FROM data_file WHERE "table" = ?', [table]
        for name, value in (("cluster", cluster), ("bucket", bucket)):
            if value is not None:
                query += f" AND {name} = ?"
                values.append(str(value))
        rows = self._link.execute(f"{query} ORDER BY bucket, first_s, file", values)
        return [DataFile(*row) for row in rows]

    def find_rollup_files(self, files: Sequence[str]) -> list[DataFile]:
        """Return the windows that were rolled up from some files of samples."""
        found: list[DataFile] = []
        for file in files:
            rows = self._link.execute(
                f"SELECT {_COLUMNS} FROM data_file WHERE rollup_of = ?", [file]
            )
            found += [DataFile(*row) for row in rows]
        return found

    def replace_files(
        self,
        dropped: Sequence[DataFile],
        made: Sequence[DataFile],
        *,
        superseded: dict[tuple[str, str], int] | None = None,
        horizon: dict[str, float] | None = None,
    ) -> None:
        """Let some files go and others come, all at once or not at all."""
        now_s = time.time()
        with self._changing():
            gone = [(part.file, now_s) for part in dropped]
            self._link.executemany(
                "DELETE FROM data_file WHERE file = ?", [row[:1] for row in gone]
            )
            self._link.executemany("INSERT OR REPLACE INTO gone VALUES (?, ?)", gone)
            marks = ", ".join("?" * len(DataFile._fields))
            self._link.executemany(f"INSERT INTO data_file VALUES ({marks})", made)
            for (table, cluster), rows in (superseded or {}).items():
                self._link.execute(
                    "INSERT OR REPLACE INTO superseded VALUES (?, ?, ?)", [table, cluster, rows]
                )
            for table, since_s in (horizon or {}).items():
                self._link.execute("INSERT OR REPLACE INTO horizon VALUES (?, ?)", [table, since_s])

    def read_snapshot(self, table: str, cluster: str | None = None) -> tuple[list[DataFile], int]:
        """Return the files of a table and how many of their rows are superseded, at one moment."""
        self._link.execute("BEGIN")
        try:
            return self.list_files(table, cluster), self.count_superseded_rows(table, cluster)
        finally:
            self._link.execute("COMMIT")

    def count_superseded_rows(self, table: str, cluster: str | None = None) -> int:
        """Return how many rows of a table have a later version in another file."""
        query, values = 'SELECT sum(rows) FROM superseded WHERE "table" = ?', [table]
        if cluster is not None:
            query, values = f"{query} AND cluster = ?", [table, cluster]
        return int(self._link.execute(query, values).fetchone()[0] or 0)

    def get_horizon(self, table: str) -> float:
        """Return the time before which rows of a table have been let go."""
        row = self._link.execute('SELECT since_s FROM horizon WHERE "table" = ?', [table])
        found = row.fetchone()
        return float(found[0]) if found else float("-inf")

    def get_cursor(self, source: str) -> str | None:
        """Return where a source is to be read on."""
        row = self._link.execute("SELECT text FROM cursor WHERE source = ?", [source]).fetchone()
        return None if row is None else str(row[0])

    def set_cursor(self, source: str, text: str) -> None:
        """Remember where a source is to be read on."""
        with self._changing():
            self._link.execute("INSERT OR REPLACE INTO cursor VALUES (?, ?)", [source, text])

    def add_contribution(self, source: str, cluster: str) -> None:
        """Remember that a source told jobs of a cluster."""
        with self._changing():
            self._link.execute(_CONTRIBUTIONS)  # Stores of this format from before have none.
            self._link.execute(
                "INSERT OR IGNORE INTO contribution VALUES (?, ?)", [source, cluster]
            )

    def list_contributors(self, cluster: str) -> list[str]:
        """Return the sources that told jobs of a cluster."""
        there = "SELECT 1 FROM sqlite_master WHERE name = 'contribution'"
        if self._link.execute(there).fetchone() is None:
            return []
        query = "SELECT source FROM contribution WHERE cluster = ? ORDER BY source"
        return [str(row[0]) for row in self._link.execute(query, [cluster])]

    def delete_unlisted_files(self, *, everything: bool = False) -> int:
        """Delete files that nobody lists any more; only a writer may.

        `everything` also finds files of a process that was killed before it listed them. There is
        one writer at a time, so none of these can be about to be listed.
        """
        past = time.time() - DELETION_GRACE_S
        rows = self._link.execute("SELECT file FROM gone WHERE at_s < ?", [past]).fetchall()
        old = {str(row[0]) for row in rows}
        if everything:
            rows = self._link.execute(
                "SELECT file FROM data_file UNION SELECT file FROM gone"
            ).fetchall()
            known = {str(row[0]) for row in rows}
            for path in self.folder.glob("*/cluster=*/**/*.parquet"):
                file = str(path.relative_to(self.folder))
                if file not in known:
                    old.add(file)
        for file in old:
            (self.folder / file).unlink(missing_ok=True)
        with self._changing():
            self._link.executemany("DELETE FROM gone WHERE file = ?", [(file,) for file in old])
        return len(old)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        self._made()
        self._link.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._link.execute("ROLLBACK")
            raise
        self._link.execute("COMMIT")


def is_store(folder: Path) -> bool:
    """Return whether a folder is a store, of this version or of an older one."""
    return any((folder / name).is_file() for name in (MANIFEST_FILE, _OLDER_FILE))


def _refuse_older_store(folder: Path) -> None:
    """Refuse a folder in which a version before format 3 keeps a store."""
    if (folder / _OLDER_FILE).is_file() and not (folder / MANIFEST_FILE).is_file():
        what = f"is a store of an older version: it has {_OLDER_FILE}, not {MANIFEST_FILE}"
        raise InputError([Problem(str(folder), what, _UPGRADE_FIX)])


def _require_room(folder: Path) -> None:
    """Say that a folder can be made, before hours are spent on reading what is to lie there."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    fix = "name another folder with --store"
    if not nearest.is_dir():
        raise InputError([Problem(str(folder), f"no store fits here: {nearest} is a file", fix)])
    if not os.access(nearest, os.W_OK | os.X_OK):
        what = f"no store can be made here: {nearest} may not be written"
        raise InputError([Problem(str(folder), what, fix)])


def _connected(path: Path | str) -> sqlite3.Connection:
    """Open a manifest, an empty one where there is none."""
    # The one `with` block of `_changing` is a transaction; else SQLite commits each statement.
    link = sqlite3.connect(path, timeout=60, isolation_level=None)
    try:
        version = link.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError as error:
        what, fix = f"not the manifest of a store: {error}", "name another folder with --store"
        raise InputError([Problem(str(path), what, fix)]) from None
    if version not in (0, FORMAT_VERSION):
        what = f"has format {version}; this version reads {FORMAT_VERSION}"
        raise InputError([Problem(str(path), what, _UPGRADE_FIX)])
    if version == 0:
        link.executescript(_SCHEMA)
        link.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
    return link
