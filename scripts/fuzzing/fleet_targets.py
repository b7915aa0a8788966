"""Targets of `scripts.fuzz_coverage`: tables, published traces and telemetry of a fleet."""

import gzip
import io
import json
import pickle
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from meshwright.errors import InputError
from meshwright.fleet.sources.public_traces.numpy_pickle import read_arrays
from meshwright.fleet.sources.source import SourceOptions
from meshwright.fleet.sources.source_registry import open_source
from meshwright.fleet.store.data_file import DataFile, read_column_names, read_file
from meshwright.fleet.tables import TABLE_SCHEMAS
from scripts.fuzzing.targets import Reader, SeedMaker
from tests.fleet.sources.public_traces.test_public_trace_source import HELIOS, KALOS, PHILLY, SEREN

_OPTIONS = SourceOptions(cluster="c")


def _read_source(path: Path, name: str, kind: str = "") -> None:
    """Read a file under a name, of a kind or of the one that its contents match."""
    folder = path.parent / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    file = folder / name
    shutil.copy(path, file)
    for batch in open_source(str(file), _OPTIONS, kind).read_batches():
        assert batch.rows.schema.names == TABLE_SCHEMAS[batch.table].names
        batch.rows.validate(full=True)


def _read_fleet_parquet(path: Path) -> None:
    """Read a file as rows that a user gives, as a public trace, and as a file of the store."""
    for name in ("jobs.parquet", "gpu_samples.parquet", "trace.parquet"):
        with suppress(InputError):
            _read_source(path, name)
    for table in ("jobs", "gpu_samples"):
        part = DataFile(table, "c", 0, path.name, 1, 1, 0.0, 1.0, 1.0, "a", "b")
        with suppress(InputError):
            read_file(path.parent, part)
        with suppress(InputError):
            read_column_names(path.parent, part)


def _make_fleet_parquet(_folder: Path) -> Iterator[bytes]:
    for table in ("jobs", "gpu_samples"):
        schema = TABLE_SCHEMAS[table]
        columns = {field.name: [_example(field.type)] * 3 for field in schema}
        written = io.BytesIO()
        pq.write_table(pa.table(columns, schema=schema), written)
        yield written.getvalue()


def _example(kind: pa.DataType) -> object:
    if pa.types.is_list(kind):
        return [_example(kind.value_type)]
    if pa.types.is_string(kind):
        return "a"
    return 1.0 if pa.types.is_floating(kind) else True if pa.types.is_boolean(kind) else 1


def _read_public_trace(path: Path) -> None:
    _read_source(path, "case.bin")
    _read_source(path, "case.bin", "public")


def _make_public_trace(_folder: Path) -> Iterator[bytes]:
    texts = [SEREN, KALOS, HELIOS, json.dumps(PHILLY)]
    for text in texts:
        yield text.encode()
    yield gzip.compress(HELIOS.encode())
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for number, text in enumerate(texts):
            archive.writestr(f"{number}.csv", text)
    yield packed.getvalue()


def _read_numpy_pickle(path: Path) -> None:
    read_arrays(path.read_bytes(), "case")


def _make_numpy_pickle(_folder: Path) -> Iterator[bytes]:
    for protocol in (3, 4):
        yield pickle.dumps([np.arange(4.0), np.ones((2, 3), ">i4"), 7, None, "x"], protocol)


def _read_fleet_json(path: Path) -> None:
    for kind in ("slurm", "kernel"):  # a kubeconfig names a server to connect to
        with suppress(InputError):
            _read_source(path, "case.json", kind)


def _make_fleet_json(_folder: Path) -> Iterator[bytes]:
    root = Path(__file__).parents[2] / "tests" / "fleet" / "sources"
    for path in sorted(root.rglob("*.json")):
        if path.stat().st_size < 40_000:
            yield path.read_bytes()
    time = {"set": True, "infinite": False, "number": 1767225600}
    job = {
        "job_id": 1, "name": "j", "user": "u", "cluster": "c", "nodes": "n[1-2]",
        "state": ["RUNNING"],
        "time": {"start": 1767225600, "end": 0, "submission": 1767225000, "eligible": time},
        "tres": {"allocated": [{"type": "gres", "name": "gpu", "count": 8}]},
    }  # fmt: skip
    yield json.dumps({"jobs": [job], "meta": {}, "errors": []}).encode()
    yield b"2026-01-01T00:00:00 n1 kernel: NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen\n"


READERS: dict[str, Reader] = {
    "fleet_parquet": _read_fleet_parquet,
    "public_trace": _read_public_trace,
    "numpy_pickle": _read_numpy_pickle,
    "fleet_json": _read_fleet_json,
}
SEEDS: dict[str, SeedMaker] = {
    "fleet_parquet": _make_fleet_parquet,
    "public_trace": _make_public_trace,
    "numpy_pickle": _make_numpy_pickle,
    "fleet_json": _make_fleet_json,
}
