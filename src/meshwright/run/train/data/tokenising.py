"""Text in files becomes tokens in shards: planned, spread over processes, and finished at once.

The plan cuts the text into parts by size alone, so the files are the same for any number of
processes. Work lies in `OUT.partial` until all parts are done, then takes the name OUT. A run that
was stopped goes on where it was if the same is asked again, and is refused if something else is.
"""

import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.run.train.data.corpus import Ints
from meshwright.run.train.data.megatron import Pair, write_megatron
from meshwright.run.train.data.parts import (
    PLAN,
    Done,
    Input,
    Plan,
    do_part,
    lengths_file,
    note_file,
    read_plan,
)
from meshwright.run.train.data.shards import (
    DOCUMENTS,
    INDEX,
    Index,
    is_shards,
    open_shards,
)
from meshwright.run.train.data.standard import (
    is_standard,
    standard_bytes,
    standard_text,
    write_standard_text,
)
from meshwright.run.train.data.text import Slice, list_files, slices, texts
from meshwright.run.train.data.tokenizer import Tokenizer
from meshwright.run.train.data.workers import run_parts
from meshwright.timeline.paths import check_parent, refusals, sync_folder

MOST_PARTS = 1024
SMALLEST_PART_BYTES = 1 << 24
LARGEST_PART_BYTES = 1 << 30
Progress = Callable[[int], None]
"""Is told how many bytes of text were done since the last call."""


class Tokenised(NamedTuple):
    """What was made."""

    documents: int
    tokens: int
    text_bytes: int
    skipped: int
    """Damaged documents left out."""
    first_skipped: str
    """The first of their faults."""


def tokenise(
    paths: Sequence[str],
    out: Path,
    tokenizer: Tokenizer,
    *,
    field: str = "text",
    skip_damaged: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Tokenised:
    """Write the tokens of files and folders of text as a folder of shards.

    A path may also be `standard`, the text that every machine has. `workers` are processes, by
    default as many as there are cores.
    """
    if out.exists():
        what = "is there already"
        raise InputError([Problem(str(out), what, "remove it, or choose another name")])
    check_parent(out)
    work = out.with_name(f"{out.name}.partial")
    plan = _resume_or_begin(paths, work, tokenizer, field=field, skip_damaged=skip_damaged)
    sizes = [sum(one.bytes for one in part) for part in plan.parts]
    missing = [part for part in range(len(plan.parts)) if not note_file(work, part).exists()]
    left = set(missing)
    advance = progress or (lambda _: None)
    advance(sum(size for part, size in enumerate(sizes) if part not in left))
    count = min(workers or _cores(), len(missing))
    if count <= 1:
        for part in missing:
            do_part(work, plan, part, tokenizer)
            advance(sizes[part])
    else:
        run_parts(work, plan, missing, count, lambda part: advance(sizes[part]))
    return _finish(work, out, plan)


def text_bytes(paths: Sequence[str]) -> int:
    """Return about how much text there is: what `progress` will be told in all."""
    files = list_files([Path(path) for path in paths if not is_standard(path)])
    known = sum(one.bytes for file in files for one in slices(file, LARGEST_PART_BYTES))
    return known + sum(standard_bytes(path) for path in paths if is_standard(path))


def read_texts(paths: Sequence[str], field: str = "text") -> Iterator[str]:
    """Yield the documents of files and folders of text; a damaged one is refused."""
    for path in paths:
        if is_standard(path):
            yield from standard_text(standard_bytes(path))
            continue
        for file in list_files([Path(path)]):
            for part in slices(file, LARGEST_PART_BYTES):
                for text in texts(part, field):
                    if isinstance(text, Problem):
                        raise InputError([text])
                    yield text


def tokenise_to_megatron(
    paths: Sequence[str], prefix: Path, tokenizer: Tokenizer, **options: object
) -> tuple[Pair, Tokenised]:
    """Write the tokens as Megatron's `.bin` and `.idx`; options as of `tokenise`."""
    shards = prefix.with_name(f"{prefix.name}.shards")
    if is_shards(shards):  # tokenised before, and stopped while the pair was written
        corpus = open_shards(shards)
        made = Tokenised(corpus.documents, corpus.tokens, corpus.text_bytes, 0, "")
    else:
        made = tokenise(paths, shards, tokenizer, **options)  # type: ignore[arg-type]
    pair = write_megatron(open_shards(shards), prefix)
    shutil.rmtree(shards)
    return pair, made


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _resume_or_begin(
    paths: Sequence[str], work: Path, tokenizer: Tokenizer, *, field: str, skip_damaged: bool
) -> Plan:
    resumed = (work / PLAN).exists()
    if not resumed:
        with refusals(work, "made"):
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
    try:
        plan = _plan(paths, work, tokenizer, field=field, skip_damaged=skip_damaged)
    except InputError:
        if not resumed:  # nothing was begun, so nothing is left behind
            shutil.rmtree(work, ignore_errors=True)
        raise
    if resumed and not _same(work, plan):
        if any(work.glob("[0-9]*.json")):
            what = "holds the beginnings of other work: the text, tokenizer or flags have changed"
            raise InputError([Problem(str(work), what, f"remove {work.name} and begin again")])
        resumed = False  # no part of it was done, so nothing is lost
    if not resumed:
        with refusals(work, "written"):
            (work / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
            partial = work / f"{PLAN}.partial"
            partial.write_bytes(msgspec.json.encode(plan))
            partial.replace(work / PLAN)
    return plan


def _same(work: Path, plan: Plan) -> bool:
    try:
        return read_plan(work) == plan
    except msgspec.MsgspecError:
        return False


def _plan(
    paths: Sequence[str], work: Path, tokenizer: Tokenizer, *, field: str, skip_damaged: bool
) -> Plan:
    given = [_written(path, work) if is_standard(path) else Path(path) for path in paths]
    files = list_files(given)
    if not files:
        raise InputError([Problem("", "no text was given", "name files or folders")])
    with refusals(work, "read"):
        stats = [file.stat() for file in files]
    inputs = tuple(
        Input(path=str(file.absolute()), size=stat.st_size, modified_ns=stat.st_mtime_ns)
        for file, stat in zip(files, stats, strict=True)
    )
    whole = sum(one.size for one in inputs)
    size = min(max(SMALLEST_PART_BYTES, whole // MOST_PARTS), LARGEST_PART_BYTES)
    cut = [one for file in files for one in slices(file.absolute(), size)]
    return Plan(
        inputs=inputs,
        parts=tuple(_grouped(cut, size)),
        field=field,
        skip_damaged=skip_damaged,
        vocabulary=tokenizer.vocabulary,
    )


def _written(path: str, work: Path) -> Path:
    """Write the standard text once, so that a run that goes on reads the same."""
    limit = standard_bytes(path)
    file = work / f"standard-{limit}.jsonl"
    if not file.exists():
        write_standard_text(file, limit)
    return file


def _grouped(cut: list[Slice], size: int) -> list[tuple[Slice, ...]]:
    """Put neighbours together until they are worth a file of tokens."""
    found: list[tuple[Slice, ...]] = []
    group: list[Slice] = []
    held = 0
    for one in cut:
        if group and held + one.bytes > size:
            found.append(tuple(group))
            group, held = [], 0
        group.append(one)
        held += one.bytes
    return [*found, tuple(group)] if group else found


def _finish(work: Path, out: Path, plan: Plan) -> Tokenised:
    """Join what the parts left, and give the folder its name."""
    parts = range(len(plan.parts))
    with refusals(work, "read"):
        done = [msgspec.json.decode(note_file(work, n).read_bytes(), type=Done) for n in parts]
    with refusals(work, "written"), (work / DOCUMENTS).open("wb") as opened:
        crc32, at = _write(opened, np.zeros(1, "<i8"), 0), 0
        for part in parts:
            lengths = np.fromfile(lengths_file(work, part), "<i8")
            crc32 = _write(opened, np.cumsum(lengths) + at, crc32)
            at += int(lengths.sum())
    if not at:
        shutil.rmtree(work, ignore_errors=True)
        left_out = sum(one.skipped for one in done)
        what = "hold no text" + (f": {left_out:,} damaged documents were left out" * bool(left_out))
        raise InputError([Problem("texts", what, "name files with text in them")])
    index = Index(
        dtype=plan.vocabulary.dtype,
        documents=sum(one.shard.documents for one in done),
        tokens=at,
        documents_crc32=crc32,
        shards=tuple(one.shard for one in done if one.shard.tokens),
        vocabulary=plan.vocabulary,
        text_bytes=sum(one.text_bytes for one in done),
        skipped=sum(one.skipped for one in done),
    )
    with refusals(work, "written"):
        (work / INDEX).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=2))
        keep = {INDEX, DOCUMENTS, "tokenizer.json", *(shard.file for shard in index.shards)}
        for file in work.iterdir():
            if file.name in keep:
                _to_disk(file)
            else:
                file.unlink()
        work.rename(out)
    sync_folder(out.absolute().parent)
    first = next((one.first_skipped for one in done if one.first_skipped), "")
    return Tokenised(index.documents, index.tokens, index.text_bytes, index.skipped, first)


def _write(opened: IO[bytes], numbers: Ints, crc32: int) -> int:
    data = numbers.astype("<i8").tobytes()
    opened.write(data)
    return zlib.crc32(data, crc32)


def _to_disk(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
