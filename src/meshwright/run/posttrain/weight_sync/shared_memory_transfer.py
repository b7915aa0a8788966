"""`SharedMemoryWriter` and `SharedMemoryReader`: weight transfer between processes of one host.

    writer = SharedMemoryWriter(plan, rank, sources, folder)    on each rank that trains
    writer.write(7)                                             its buckets; all see them at once
    reader = SharedMemoryReader(plan, rank, targets, folder)    on each rank that serves
    reader.load(7, patience_s=60)                               checks and takes version 7
    writer.remove(7)                                            gives the memory back

Each source has a file for each version; it appears under its name only when it is complete, and
what several targets want stands in it once where the plan was made for broadcasts. A folder in
`/dev/shm` is memory; one on a disk works as well, at its speed.
"""

import mmap
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from meshwright.errors import MeshwrightError
from meshwright.policy.resharding.weight_transfer import (
    BUCKET_BYTES,
    WeightBucket,
    WeightTransferPlan,
)
from meshwright.run.nn.sharding.sharded_tensor import ShardedTensor
from meshwright.run.posttrain.weight_sync.bucket_packing import (
    CorruptBucketError,
    compute_bucket_bytes,
    pack_bucket,
)
from meshwright.run.posttrain.weight_sync.weight_buffer import WeightBuffer
from meshwright.run.posttrain.weight_sync.weight_tensors import WeightTarget
from meshwright.spec.units import format_bytes

_LOOK_S = 0.01
"""How long to wait between two looks for a file."""


class VersionTimeoutError(MeshwrightError):
    """Some source has not posted a version in time."""


class SharedMemoryFullError(MeshwrightError):
    """A version does not fit where versions are laid out."""


class SharedMemoryWriter:
    """What one source lays out for others."""

    def __init__(
        self,
        plan: WeightTransferPlan,
        rank: int,
        sources: Mapping[str, ShardedTensor],
        folder: Path,
        *,
        most_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Post what source `rank` has to send."""
        self._plan, self._rank, self._tensors, self._folder = plan, rank, dict(sources), folder
        self._parcels = [each for each in plan.make_buckets(most_bytes) if each.source == rank]

    def write(self, version: int) -> int:
        """Write a version; return its bytes.

        Raises:
            SharedMemoryFullError: where they do not fit.
        """
        size = sum(map(compute_bucket_bytes, self._parcels))
        write_version_file(self._folder, version, self._rank, size, partial(self._write, version))
        return size

    def _write(self, version: int, file: Tensor) -> None:
        for parcel, start in compute_bucket_offsets(self._parcels):
            room = file[start : start + compute_bucket_bytes(parcel)]
            pack_bucket(parcel, self._tensors, version, self._plan.digest, room)

    def remove(self, version: int) -> None:
        """Remove a version; who has opened it may still read it."""
        path = _path(self._folder, version, self._rank)
        path.unlink(missing_ok=True)
        # Others may have files in the folder, or have removed it just now.
        with suppress(OSError):
            path.parent.rmdir()


def write_version_file(
    folder: Path, version: int, source: int, size: int, write: Callable[[Tensor], object]
) -> None:
    """Let what a source has of a version be written, and be seen at once.

    Raises:
        SharedMemoryFullError: where so many bytes do not fit.
    """
    path = _path(folder, version, source)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    if size:
        with part.open("w+b") as file:
            _reserve(file.fileno(), size, part)
            with mmap.mmap(file.fileno(), size) as memory:
                write(torch.frombuffer(memory, dtype=torch.uint8))
    else:
        part.touch()
    part.rename(path)


class SharedMemoryReader:
    """What one target takes of it."""

    def __init__(
        self,
        plan: WeightTransferPlan,
        rank: int,
        places: Mapping[str, WeightTarget],
        folder: Path | str,
        *,
        most_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Take what target `rank` wants."""
        parcels = plan.make_buckets(most_bytes)
        self.buffer = WeightBuffer(plan, rank, places, buckets=parcels)
        self.folder = Path(folder)
        self._of = {
            source: [each for each in parcels if each.source == source]
            for source in sorted({each.source for each in self.buffer.buckets})
        }

    def verify(self, version: int, *, patience_s: float) -> None:
        """Check a version where it lies, without taking it.

        Ranks of one engine agree that all have it before each of them commits.

        Raises:
            VersionTimeoutError: where a source has not posted it in time.
            CorruptBucketError: where it is not what was posted.
        """
        self.buffer.begin_version(version)
        paths = {source: _path(self.folder, version, source) for source in self._of}
        _await(paths, version, patience_s)
        for source, path in paths.items():
            bytes_ = _mapped(path, sum(map(compute_bucket_bytes, self._of[source])))
            for parcel, start in compute_bucket_offsets(self._of[source]):
                if parcel in self.buffer.buckets:
                    self.buffer.use_external_buffer(
                        parcel, bytes_[start : start + compute_bucket_bytes(parcel)]
                    )
                    self.buffer.accept_bucket(parcel)

    def load(self, version: int, *, patience_s: float) -> None:
        """Check a version and take it; what fails leaves the model as it is."""
        try:
            self.verify(version, patience_s=patience_s)
        except MeshwrightError:
            self.buffer.discard()
            raise
        self.buffer.commit()


def _path(folder: Path, version: int, source: int) -> Path:
    return folder / f"version-{version}" / f"source-{source}.weights"


def _reserve(file: int, size: int, path: Path) -> None:
    """Take a file's room at once: writing to memory that is not there would end the process."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, size)
        else:
            os.truncate(file, size)
    except OSError as error:
        path.unlink()
        free = shutil.disk_usage(path.parent).free
        what = f"{path.parent} has {format_bytes(free)} left, {format_bytes(size)} are needed"
        fix = "make it larger (docker run --shm-size), or remove what killed runs left there"
        raise SharedMemoryFullError(f"{what}: {fix}") from error


def compute_bucket_offsets(buckets: Sequence[WeightBucket]) -> list[tuple[WeightBucket, int]]:
    """Return where each parcel of a source begins in its file."""
    found, at = [], 0
    for parcel in buckets:
        found.append((parcel, at))
        at += compute_bucket_bytes(parcel)
    return found


def _mapped(path: Path, size: int) -> Tensor:
    """Return a file as bytes that are read where they lie; writing to them changes no file."""
    found = path.stat().st_size
    if found != size:
        what = f"has {found:,} bytes, not {size:,}: it was published by another plan"
        raise CorruptBucketError(f"{path.name} {what}")
    return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)


def _await(paths: Mapping[int, Path], version: int, patience_s: float) -> None:
    end = time.monotonic() + patience_s
    while missing := [source for source, path in paths.items() if not path.exists()]:
        if time.monotonic() >= end:
            what = f"sources {missing} have not published it within {patience_s:g} s"
            raise VersionTimeoutError(f"version {version}: {what}; look at what they do")
        time.sleep(_LOOK_S)
