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

from meshwright.run.train.data.document_split import DocumentSplit
from meshwright.run.train.data.fingerprint import compute_fingerprint
from meshwright.run.train.data.packing.best_fit_packing import (
    BestFitPacking,
    PackingPlan,
    get_document_index_dtype,
    plan_in_memory,
    plan_windows,
)
from meshwright.run.train.data.tokenization.process_lock import acquire_exclusive_lock

VERSION = 2
"""Goes up with every change of what a plan holds, so that no old one is taken for a new one."""


class PackingPlanHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `plan.json` holds."""

    version: int = VERSION
    sequences: int
    num_spans: int
    max_documents: int
    """Pieces in one sequence, at most."""


def open_packing(selection: DocumentSplit, length: int, folder: Path | None) -> BestFitPacking:
    """Open the packing of a selection, made first where it is not in the folder yet."""
    if folder is not None:
        name = f"pack-{length}-{compute_fingerprint(VERSION, selection.name, length)[:16]}"
        try:
            return _opened(selection, length, folder / name)
        except (OSError, msgspec.MsgspecError, ValueError):
            pass  # not there, or not whole: made again below, if the folder can be written
        try:
            with acquire_exclusive_lock(folder, name):
                try:
                    return _opened(selection, length, folder / name)
                except (OSError, msgspec.MsgspecError, ValueError):
                    _make(selection, length, folder / name)
                return _opened(selection, length, folder / name)
        except OSError:
            pass  # a folder that cannot be written, or a full disk: the plan fits memory
    plan = plan_in_memory(selection, length)
    return BestFitPacking(selection, length, plan, int(np.diff(plan.sequence_offsets).max()))


def _opened(selection: DocumentSplit, length: int, folder: Path) -> BestFitPacking:
    counts = msgspec.json.decode((folder / "plan.json").read_bytes(), type=PackingPlanHeader)
    plan = PackingPlan(
        _mapped(folder / "firsts", "<i8", counts.sequences + 1),
        _mapped(folder / "places", get_document_index_dtype(selection), counts.num_spans),
        _mapped(folder / "parts", "<u4", counts.num_spans),
    )
    return BestFitPacking(selection, length, plan, counts.max_documents)


def _mapped(file: Path, dtype: str, count: int) -> NDArray[Any]:
    mapped = np.asarray(np.memmap(file, dtype, "r"))
    if len(mapped) != count:
        raise ValueError(f"{file} holds {len(mapped)} values, not {count}")
    return mapped


def _make(selection: DocumentSplit, length: int, folder: Path) -> None:
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
            (np.cumsum(window.sequence_document_counts) + pieces).astype("<i8").tofile(firsts)
            window.documents.astype(get_document_index_dtype(selection)).tofile(places)
            window.document_parts.astype("<u4").tofile(parts)
            sequences += len(window.sequence_document_counts)
            pieces += len(window.documents)
            most = max(most, int(window.sequence_document_counts.max(initial=0)))
    counts = PackingPlanHeader(sequences=sequences, num_spans=pieces, max_documents=most)
    (partial / "plan.json").write_bytes(msgspec.json.encode(counts))
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
