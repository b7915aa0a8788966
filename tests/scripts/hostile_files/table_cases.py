"""Hostile tables, databases and archives, by the target of `scripts.fuzzing` that reads them."""

import gzip
import io
import json
import pickle
import sqlite3
import tarfile
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from scripts.fuzzing import fleet_targets, seed_files, trace_targets
from tests.scripts.hostile_files.trace_cases import zeros_as_gzip

Cases = dict[tuple[str, str], bytes]
_STATEMENTS = {
    "a view that never ends": (
        "DROP TABLE StringIds",
        "CREATE VIEW StringIds AS WITH RECURSIVE c(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM c)"
        " SELECT id, 'a' AS value FROM c",
    ),
    "a trigger": (
        "CREATE TRIGGER t AFTER INSERT ON StringIds BEGIN DELETE FROM StringIds; END",
    ),
    "a generated column": (
        "DROP TABLE StringIds",
        "CREATE TABLE StringIds (id INTEGER, value TEXT AS (hex(zeroblob(9999999))))",
        "INSERT INTO StringIds (id) VALUES (1)",
    ),
    "a default that is computed": (
        "DROP TABLE StringIds",
        "CREATE TABLE StringIds (id INTEGER, value TEXT DEFAULT (hex(randomblob(9))))",
        "INSERT INTO StringIds (id) VALUES (1)",
    ),
    "an index of an expression": ("CREATE INDEX i ON StringIds (hex(zeroblob(9)))",),
    "a long text": ("INSERT INTO StringIds VALUES (99, hex(zeroblob(400000)))",),
    "a blob as a name": ("UPDATE StringIds SET value = zeroblob(60000)",),
    "far times": ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 9223372036854775807, end = 1",),
    "texts as times": ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 'x', end = 'y'",),
    "floats as times": ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = 1e308, end = 9e999",),
    "nulls": ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET start = NULL, deviceId = NULL",),
    "far devices": ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 4611686018427387904",),
    "far names": ("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET demangledName = -1",),
    "a table of another kind": (
        "DROP TABLE StringIds", "CREATE VIRTUAL TABLE StringIds USING fts5(id, value)",
    ),
    "no tables": ("DROP TABLE StringIds", "DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL"),
    "many tables": tuple(f"CREATE TABLE t{n} (a)" for n in range(60)),
    "odd names": ('CREATE TABLE "a""; DROP TABLE StringIds; --" (a)',),
}  # fmt: skip


def sqlite_cases(folder: Path) -> Cases:
    """Return exports of Nsight Systems, changed by statements and by bytes."""
    (whole,) = trace_targets.SEEDS["nsight"](folder)
    found: Cases = {}
    for name, statements in _STATEMENTS.items():
        path = folder / "changed.sqlite"
        path.write_bytes(whole)
        connection = sqlite3.connect(path)
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("PRAGMA journal_mode=MEMORY")
        for statement in statements:
            with suppress(sqlite3.OperationalError):  # this SQLite lacks the module fts5
                connection.execute(statement)
        connection.commit()
        connection.close()
        found["nsight", name] = path.read_bytes()
    for size in (0, 15, 16, 99, 100, 4_096, 5_000, len(whole) // 2, len(whole) - 1):
        found["nsight", f"cut at {size}"] = whole[:size]
    for at, value in ((16, b"\x00\x03"), (18, b"\x09\x09"), (28, b"\xff" * 4), (32, b"\xff" * 4),
                      (44, b"\xff" * 4), (56, b"\x00\x00\x00\x02"), (100, b"\xff" * 16),
                      (4_096, b"\xff" * 64), (8_192, b"\x05" + b"\xff" * 8)):  # fmt: skip
        found["nsight", f"bytes at {at}"] = whole[:at] + value + whole[at + len(value) :]
    found["nsight", "gzip bomb"] = gzip.compress(whole) + zeros_as_gzip(70)
    return found


def _parquet(table: pa.Table, **options: Any) -> bytes:
    written = io.BytesIO()
    pq.write_table(table, written, **options)
    return written.getvalue()


def parquet_cases(folder: Path) -> Cases:
    """Return Parquet files and Arrow streams."""
    spans = next(trace_targets.SEEDS["timeline_parquet"](folder))
    table = pq.read_table(io.BytesIO(spans))
    rows = table.num_rows
    made = {
        "a column twice": table.append_column("rank", table["rank"]),
        "no columns": pa.table({"x": [1]}),
        "no rows": table.slice(0, 0),
        "times as texts": table.set_column(
            table.schema.get_field_index("start_ns"), "start_ns", pa.array(["x"] * rows)),
        "times as lists": table.set_column(
            table.schema.get_field_index("start_ns"), "start_ns", pa.array([[1]] * rows)),
        "nulls": table.set_column(
            table.schema.get_field_index("rank"), "rank", pa.nulls(rows, pa.int32())),
        "far ranks": table.set_column(
            table.schema.get_field_index("rank"), "rank", pa.array([2**62] * rows)),
        "texts that are no UTF-8": table.set_column(
            table.schema.get_field_index("name"), "name",
            pa.array([b"\xff\xfe"] * rows).view(pa.string())),
        "a version to come": table.replace_schema_metadata({"meshwright.version": "9" * 5_000}),
        "facts that are no JSON": table.replace_schema_metadata({"meshwright.metadata": b"\xea{"}),
        "a dictionary bomb": pa.table({"x": _one_word(9_000)}),
        "a bomb of zeros": pa.table({"x": pa.array(np.zeros(2_000_000, np.int64))}),
        "a bomb of texts": pa.table({"text": pa.array(["y" * 20_000] * 500)}),
        "deep columns": pa.table({"x": _deep(60)}),
        "many columns": pa.table({f"c{n}": [1] for n in range(900)}),
        "control letters": pa.table({"\x1b[2J": [1], "a\x00b": [2]}),
    }  # fmt: skip
    found: Cases = {}
    for name, changed in made.items():
        body = _parquet(changed, compression="zstd", store_schema=name != "no rows")
        for target in ("timeline_parquet", "fleet_parquet", "text_parquet"):
            found[target, name] = body
    jobs = next(fleet_targets.SEEDS["fleet_parquet"](folder))
    texts = next(seed_files.make_text_parquet(folder))
    wholes = {"timeline_parquet": spans, "fleet_parquet": jobs, "text_parquet": texts}
    for target, whole in wholes.items():
        for size in (0, 3, 4, 8, 12, len(whole) // 2, len(whole) - 9, len(whole) - 1):
            found[target, f"cut at {size}"] = whole[:size]
        found[target, "a far footer"] = whole[:-8] + b"\xff\xff\xff\x7fPAR1"
        found[target, "no footer"] = whole[:-8] + b"\x00\x00\x00\x00PAR1"
        for at in range(len(whole) - 400, len(whole) - 8, 37):
            found[target, f"a byte at {at}"] = whole[:at] + b"\x95" + whole[at + 1 :]
    (entry,) = trace_targets.SEEDS["trace_cache"](folder)
    for at in range(0, len(entry), 397):
        found["trace_cache", f"a byte at {at}"] = entry[:at] + b"\xea" + entry[at + 1 :]
        found["trace_cache", f"cut at {at}"] = entry[:at]
    return found


def _one_word(rows: int) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["y" * 50_000])


def _deep(levels: int) -> pa.Array:
    array = pa.array([1])
    for _ in range(levels):
        array = pa.StructArray.from_arrays([array], ["a"])
    return array


def archive_cases() -> Cases:
    """Return public traces in archives, pickled arrays, lines of JSON and records."""
    packed, tarred = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("../../jobs.csv", "job_id,user\n" + "1,a\n" * 9)
        archive.writestr("zeros.csv", b"0" * (9 << 20))
    with tarfile.open(fileobj=tarred, mode="w:gz") as tar:
        for name, kind in (("a.csv", tarfile.REGTYPE), ("/etc/x", tarfile.SYMTYPE), ("b", b"9")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
    (arrays, *_) = fleet_targets.SEEDS["numpy_pickle"](Path())
    traces = {
        "a zip with odd names": packed.getvalue(), "a tar with links": tarred.getvalue(),
        "a zip cut off": packed.getvalue()[:99], "a gzip bomb": zeros_as_gzip(60),
        "an empty zip": b"PK\x05\x06" + bytes(18), "a wide header": b"a," * 60_000 + b"\n1\n",
        "a long field": b"job_id,user\n1," + b"x" * 60_000, "quotes": b'a,b\n"' + b'""' * 9_000,
        "deep JSON": b'[{"jobid":' + b"[" * 50_000, "NUL": b"job_id\x00,user\n",
        "a far number": b"job_id,gpu_num,submit_time\n1,1e999,9e999\n",
        "a pickle": pickle.dumps([1]), "UTF-16": "job_id,user\n1,a\n".encode("utf-16"),
    }  # fmt: skip
    pickles = {
        "objects": pickle.dumps([Path("x")]), "cut off": arrays[:-9], "nothing": b"",
        "a far shape": arrays.replace(b"K\x04\x85", b"J\xff\xff\xff\x7f\x85"),
        "marks": b"\x80\x03" + b"(" * 60_000 + b".", "ends without marks": b"\x80\x03" + b"e" * 99,
        "a far memo": b"\x80\x03]j\xff\xff\xff\x7f.",
        "marks and tuples": b"\x80\x03(" + b"(t" * 9_000,
        "a huge integer": b"\x80\x03\x8a\xff" + b"\x7f" * 255 + b".",
        "a call": b"\x80\x03cos\nsystem\n(tR.", "a state of nothing": b"\x80\x03Nb.",
        "doubled": b"\x80\x03]q\x00" + b"h\x00h\x00\x86" * 5_000 + b".",
    }  # fmt: skip
    line = json.dumps({"text": "a"}).encode()
    records = {
        "deep": b'{"text":' * 30_000, "a long line": b'{"text": "' + b"x" * 60_000,
        "a far number": b'{"timestamp": 1e999, "input_length": 9e99, "output_length": -1}',
        "far blocks": b'{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [9e9]}',
        "no UTF-8": b'{"text": "\xff\xfe"}', "NUL": b"\x00" * 60_000, "nothing": b"",
        "a gzip bomb": gzip.compress(line) + zeros_as_gzip(40, b"\n"),
        "a key twice": b'{"a": 1, "a": 2}',
        "no objects": b"1\n2\n3\n", "one list": b"[" + b"[" * 9_000, "a table": b"a,b\n1,2\n",
        "a wide table": b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"1," * 60_000,
        "an open quote": b'TIMESTAMP,ContextTokens,GeneratedTokens\n"' + b"1\n" * 9_000,
        "far times": b"TIMESTAMP,ContextTokens,GeneratedTokens\n9999999-99-99 99:99:99,9e99,-1\n",
    }  # fmt: skip
    found: Cases = {("public_trace", name): body for name, body in traces.items()}
    found |= {("numpy_pickle", name): body for name, body in pickles.items()}
    return found | {("records", name): body for name, body in records.items()}
