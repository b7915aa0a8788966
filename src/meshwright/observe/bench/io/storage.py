"""A folder's storage: large reads and writes, random reads, waiting for the disk, small files.

Writes go through the page cache and count until the disk has them, as a checkpoint's do. Reads pass
the cache by where that can be done (`page_cache`), except `read_cached`. All files lie in a folder
that goes again. One process with threads reads, so that small blocks are bounded by Python at a few
hundred thousand reads per second.
"""

import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

from meshwright.errors import MeshwrightError
from meshwright.observe.bench.bench_case import BenchCase, BenchRow, SizeValue
from meshwright.observe.bench.bench_family import (
    BenchFamily,
    BenchTarget,
    FailedCase,
    Size,
    build_row,
    prepare_nothing,
)
from meshwright.observe.bench.io.page_cache import (
    CacheBypass,
    UncachedFile,
    detect_cache_bypass,
    detect_file_system,
)
from meshwright.observe.bench.io.scratch_folder import create_scratch_folder
from meshwright.observe.bench.timing import time_passes
from meshwright.spec.units import format_bytes

_KIB, _MIB = 1 << 10, 1 << 20
FILE_BYTES: dict[Size, int] = {"quick": 64 * _MIB, "full": 256 * _MIB}
FILES: dict[Size, int] = {"quick": 200, "full": 1000}
BLOCKS: dict[Size, tuple[int, ...]] = {
    "quick": (4 * _KIB, _MIB),
    "full": (4 * _KIB, 64 * _KIB, _MIB),
}
AT_ONCE = (1, 16)
SMALL_BYTES = 4 * _KIB
SYNCS = 8
"""Small writes of one pass, each waited for."""
FREE_SPACE_FACTOR = 3
"""A checkpoint's next one lies beside it for a while, and other files beside both."""


def build_storage_family(folder: Path) -> BenchFamily:
    """Return the family for a folder; rows of other file systems are other cases."""
    kind = detect_file_system(folder)

    def cases(size: Size, _on_gpu: bool) -> tuple[BenchCase, ...]:
        whole, way = FILE_BYTES[size], detect_cache_bypass(folder)
        found: list[tuple[str, dict[str, SizeValue]]] = [
            ("write", {"bytes": whole, "block": _MIB}),
            ("read", {"bytes": whole, "block": _MIB, "cache": way}),
            ("fsync", {"bytes": SMALL_BYTES, "times": SYNCS}),
        ]
        found += [
            ("random_read", {"bytes": whole, "block": block, "at_once": at_once, "cache": way})
            for block in BLOCKS[size]
            for at_once in AT_ONCE
        ]
        found += [
            (name, {"files": FILES[size], "bytes": SMALL_BYTES})
            for name in ("create", "stat", "unlink")
        ]
        found += [("checkpoint_save", {"bytes": whole}), ("checkpoint_load", {"bytes": whole})]
        found.append(("read_cached", {"bytes": whole, "block": _MIB}))
        return tuple(
            BenchCase(family="storage", name=name, sizes={**sizes, "fs": kind})
            for name, sizes in found
            if sizes.get("cache") != "none"
        )

    def sweep(
        asked: Sequence[BenchCase], _place: BenchTarget, end: float
    ) -> Iterator[BenchRow | FailedCase]:
        if not asked:
            return
        with create_scratch_folder(folder) as own:
            disk = _StorageFolder(own)
            for case in asked:
                if time.monotonic() > end:
                    return
                try:
                    yield disk.row(case)
                except (OSError, RuntimeError, MeshwrightError) as fault:
                    yield case.key, str(fault).splitlines()[0]

    return BenchFamily(
        "storage",
        "files in a folder",
        cases,
        prepare_nothing,
        runs_on_device=False,
        run_all=sweep,
        typical_s={"quick": 4.0, "full": 12.0},
    )


class _StorageFolder:
    """A folder, and what has been written to it so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._draw = Random(7)
        # Of random bytes: some file systems make nothing of zeros.
        self._block = os.urandom(_MIB)

    def row(self, case: BenchCase) -> BenchRow:
        room = shutil.disk_usage(self._folder).free
        needed = FREE_SPACE_FACTOR * case.size("bytes") * int(case.sizes.get("files", 1))
        if room < needed:
            raise OSError(f"{format_bytes(needed)} are needed, {format_bytes(room)} are free")
        ways: dict[str, Callable[[BenchCase], BenchRow]] = {
            "write": self._write,
            "read": self._read,
            "read_cached": self._read,
            "random_read": self._random_read,
            "fsync": self._fsync,
            "create": self._small,
            "stat": self._small,
            "unlink": self._small,
            "checkpoint_save": self._checkpoint,
            "checkpoint_load": self._checkpoint,
        }
        return ways[case.name](case)

    def _fill(self, path: Path, size: int) -> None:
        with path.open("wb", buffering=0) as file:
            for start in range(0, size, _MIB):
                file.write(self._block[: min(_MIB, size - start)])
            os.fsync(file.fileno())

    def _file(self, size: int) -> Path:
        path = self._folder / f"data-{size}"
        if not path.exists():
            self._fill(path, size)
        return path

    def _write(self, case: BenchCase) -> BenchRow:
        size = case.size("bytes")
        path = self._folder / "written"
        timed = time_passes(
            lambda: self._fill(path, size), lambda: path.unlink(missing_ok=True), most=10
        )
        path.unlink()
        return build_row(case, timed, bytes=float(size))

    def _read(self, case: BenchCase) -> BenchRow:
        size, block = case.size("bytes"), case.size("block")
        way: CacheBypass = case.sizes.get("cache", "none")  # type: ignore[assignment]
        buffer = mmap.mmap(-1, block)
        with UncachedFile(self._file(size), way) as file:

            def run() -> None:
                for start in range(0, size, block):
                    file.read(buffer, start)

            if case.name == "read_cached":
                run()
            timed = time_passes(run, file.drop_cache, most=10)
        return build_row(case, timed, bytes=float(size))

    def _random_read(self, case: BenchCase) -> BenchRow:
        size, block, at_once = (case.size(name) for name in ("bytes", "block", "at_once"))
        way: CacheBypass = case.sizes["cache"]  # type: ignore[assignment]
        each = max(4, (64 * _KIB // block) * 4)
        reads = each * at_once
        buffers = [mmap.mmap(-1, block) for _ in range(at_once)]
        with UncachedFile(self._file(size), way) as file, ThreadPoolExecutor(at_once) as threads:

            def some(buffer: mmap.mmap, starts: Sequence[int]) -> None:
                for start in starts:
                    file.read(buffer, start)

            def run() -> None:
                places = [
                    [block * self._draw.randrange(size // block) for _ in range(each)]
                    for _ in range(at_once)
                ]
                list(threads.map(some, buffers, places))

            run()
            timed = time_passes(run, file.drop_cache)
        return build_row(case, timed, bytes=float(reads * block), items=float(reads))

    def _fsync(self, case: BenchCase) -> BenchRow:
        times, data = case.size("times"), self._block[: case.size("bytes")]
        path = self._folder / "synced"
        with path.open("wb", buffering=0) as file:

            def run() -> None:
                for _ in range(times):
                    file.write(data)
                    os.fsync(file.fileno())

            timed = time_passes(run)
        path.unlink()
        return build_row(case, timed, items=float(times))

    def _small(self, case: BenchCase) -> BenchRow:
        files, data = case.size("files"), self._block[: case.size("bytes")]
        inside = self._folder / "small"
        paths = [inside / f"{number:06d}" for number in range(files)]

        def create() -> None:
            for path in paths:
                path.write_bytes(data)

        def clear() -> None:
            shutil.rmtree(inside, ignore_errors=True)
            inside.mkdir()

        def fresh() -> None:
            clear()
            create()

        def stat() -> None:
            for path in paths:
                path.stat()

        def unlink() -> None:
            for path in paths:
                path.unlink()

        run, before = {
            "create": (create, clear), "stat": (stat, None), "unlink": (unlink, fresh)
        }[case.name]  # fmt: skip
        fresh()
        timed = time_passes(run, before, most=10)
        shutil.rmtree(inside)
        return build_row(case, timed, items=float(files))

    def _checkpoint(self, case: BenchCase) -> BenchRow:
        """Save or load by the trainer's own checkpoints, with all their checks and waits."""
        import torch

        from meshwright.run.train.checkpoint import CheckpointConfig, CheckpointManager

        size = case.size("bytes")
        tensors = {
            f"weight.{number}": torch.randn(_MIB) for number in range(max(1, size // (4 * _MIB)))
        }
        settings = CheckpointConfig(async_save=False, keep_last=1)
        inside = self._folder / "checkpoints"
        with CheckpointManager(inside, settings) as checkpoints:
            steps = iter(range(1, 1000))

            def save() -> None:
                checkpoints.save(next(steps), tensors, {})

            save()
            run = save if case.name == "checkpoint_save" else lambda: checkpoints.load(tensors)
            timed = time_passes(run, most=5)
        shutil.rmtree(inside)
        return build_row(case, timed, bytes=float(sum(each.nbytes for each in tensors.values())))
