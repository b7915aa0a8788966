"""Packing plans kept on disk, made once for a corpus and a length of sequence.

    plans/pack-4096-8f…/plan.json    counts; written before the folder takes its name
    plans/pack-4096-8f…/firsts       int64, little-endian as the others
    plans/pack-4096-8f…/places       uint32 or uint64
    plans/pack-4096-8f…/parts        uint32

The processes of a node take turns at a lock: the first makes the plan, the others map it. Where
nothing can be written, each makes its own in memory.
"""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.run.train.data.fingerprint import fingerprint
from meshwright.run.train.data.lock import alone
from meshwright.run.train.data.packing import (
    Pack,
    Plan,
    place_dtype,
    plan_in_memory,
    plan_windows,
)
from meshwright.run.train.data.selection import Selection

VERSION = 1
"""Goes up with every change of what a plan holds, so that no old one is taken for a new one."""


class Counts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `plan.json` holds."""

    version: int = VERSION
    sequences: int
    pieces: int
    most_pieces: int
    """Pieces in one sequence, at most."""


def pack(selection: Selection, length: int, folder: Path | None) -> Pack:
    """Open the packing of a selection, made first where it is not in the folder yet."""
    if folder is not None:
        name = f"pack-{length}-{fingerprint(VERSION, selection.name, length)[:16]}"
        try:
            return _opened(selection, length, folder / name)
        except (OSError, msgspec.MsgspecError, ValueError):
            pass  # not there, or not whole: made again below, if the folder can be written
        try:
            with alone(folder, name):
                try:
                    return _opened(selection, length, folder / name)
                except (OSError, msgspec.MsgspecError, ValueError):
                    _make(selection, length, folder / name)
                return _opened(selection, length, folder / name)
        except OSError:
            pass  # a folder that cannot be written, or a full disk: the plan fits memory
    plan = plan_in_memory(selection, length)
    return Pack(selection, length, plan, int(np.diff(plan.firsts).max()))


def _opened(selection: Selection, length: int, folder: Path) -> Pack:
    counts = msgspec.json.decode((folder / "plan.json").read_bytes(), type=Counts)
    plan = Plan(
        _mapped(folder / "firsts", "<i8", counts.sequences + 1),
        _mapped(folder / "places", place_dtype(selection), counts.pieces),
        _mapped(folder / "parts", "<u4", counts.pieces),
    )
    return Pack(selection, length, plan, counts.most_pieces)


def _mapped(file: Path, dtype: str, count: int) -> NDArray[Any]:
    mapped = np.asarray(np.memmap(file, dtype, "r"))
    if len(mapped) != count:
        raise ValueError(f"{file} holds {len(mapped)} numbers, not {count}")
    return mapped


def _make(selection: Selection, length: int, folder: Path) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    sequences = pieces = most = 0
    with (
        (partial / "firsts").open("wb") as firsts,
        (partial / "places").open("wb") as places,
        (partial / "parts").open("wb") as parts,
    ):
        np.zeros(1, "<i8").tofile(firsts)
        for window in plan_windows(selection, length):
            (np.cumsum(window.counts) + pieces).astype("<i8").tofile(firsts)
            window.places.astype(place_dtype(selection)).tofile(places)
            window.parts.astype("<u4").tofile(parts)
            sequences += len(window.counts)
            pieces += len(window.places)
            most = max(most, int(window.counts.max(initial=0)))
    counts = Counts(sequences=sequences, pieces=pieces, most_pieces=most)
    (partial / "plan.json").write_bytes(msgspec.json.encode(counts))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
