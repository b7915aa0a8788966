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
from meshwright.file_errors import convert_os_errors, fsync_folder, make_parent_folder
from meshwright.run.train.data.corpus.corpus import Ints
from meshwright.run.train.data.corpus.megatron_dataset import MegatronFiles, write_megatron
from meshwright.run.train.data.corpus.token_shards import (
    DOCUMENTS_FILE,
    INDEX_FILE,
    TokenShardIndex,
    is_token_shards,
    open_token_shards,
)
from meshwright.run.train.data.tokenization.builtin_text import (
    generate_builtin_documents,
    is_builtin,
    parse_builtin_bytes,
    write_builtin_text,
)
from meshwright.run.train.data.tokenization.text_files import (
    TextSlice,
    list_files,
    read_documents,
    split_file,
)
from meshwright.run.train.data.tokenization.tokenization_worker import (
    PLAN_FILE,
    InputFile,
    ShardDone,
    TokenizePlan,
    get_done_file,
    get_lengths_file,
    read_plan,
    tokenize_shard,
)
from meshwright.run.train.data.tokenization.tokenizer import TextTokenizer
from meshwright.run.train.data.tokenization.worker_pool import run_shards

MAX_SHARDS = 1024
MIN_SHARD_BYTES = 1 << 24
MAX_SHARD_BYTES = 1 << 30
ProgressCallback = Callable[[int], None]
"""Is told how many bytes of text were done since the last call."""


class TokenizeResult(NamedTuple):
    """What was made."""

    documents: int
    tokens: int
    text_bytes: int
    skipped: int
    """Damaged documents left out."""
    first_skipped: str
    """The first of their faults."""


def tokenize_files(
    paths: Sequence[str],
    out: Path,
    tokenizer: TextTokenizer,
    *,
    field: str = "text",
    skip_damaged: bool = False,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> TokenizeResult:
    """Write the tokens of files and folders of text as a folder of shards.

    A path may also be `builtin`, the text that every machine has. `workers` are processes, by
    default as many as there are cores.
    """
    if out.exists():
        what = "is there already"
        raise InputError([Problem(str(out), what, "remove it, or choose another name")])
    if not out.absolute().parent.is_dir():
        # A source that is not there is refused before any folder is made.
        list_files([Path(path) for path in paths if not is_builtin(path)])
        make_parent_folder(out)
    work = out.with_name(f"{out.name}.partial")
    plan = _resume_or_begin(paths, work, tokenizer, field=field, skip_damaged=skip_damaged)
    sizes = [sum(one.size_bytes for one in part) for part in plan.shards]
    missing = [part for part in range(len(plan.shards)) if not get_done_file(work, part).exists()]
    left = set(missing)
    advance = progress or (lambda _: None)
    advance(sum(size for part, size in enumerate(sizes) if part not in left))
    count = min(workers or _cores(), len(missing))
    if count <= 1:
        for part in missing:
            tokenize_shard(work, plan, part, tokenizer)
            advance(sizes[part])
    else:
        run_shards(work, plan, missing, count, lambda part: advance(sizes[part]))
    return _finish(work, out, plan)


def count_text_bytes(paths: Sequence[str]) -> int:
    """Return about how much text there is: what `progress` will be told in all."""
    files = list_files([Path(path) for path in paths if not is_builtin(path)])
    known = sum(one.size_bytes for file in files for one in split_file(file, MAX_SHARD_BYTES))
    return known + sum(parse_builtin_bytes(path) for path in paths if is_builtin(path))


def read_all_documents(paths: Sequence[str], field: str = "text") -> Iterator[str]:
    """Yield the documents of files and folders of text; a damaged one is refused."""
    for path in paths:
        if is_builtin(path):
            yield from generate_builtin_documents(parse_builtin_bytes(path))
            continue
        for file in list_files([Path(path)]):
            for part in split_file(file, MAX_SHARD_BYTES):
                for text in read_documents(part, field):
                    if isinstance(text, Problem):
                        raise InputError([text])
                    yield text


def tokenize_to_megatron(
    paths: Sequence[str], prefix: Path, tokenizer: TextTokenizer, **options: object
) -> tuple[MegatronFiles, TokenizeResult]:
    """Write the tokens as Megatron's `.bin` and `.idx`; options as of `tokenize_files`."""
    shards = prefix.with_name(f"{prefix.name}.shards")
    if is_token_shards(shards):  # tokenized before, and stopped while the pair was written
        corpus = open_token_shards(shards)
        made = TokenizeResult(corpus.num_documents, corpus.num_tokens, corpus.text_bytes, 0, "")
    else:
        made = tokenize_files(paths, shards, tokenizer, **options)  # type: ignore[arg-type]
    pair = write_megatron(open_token_shards(shards), prefix)
    shutil.rmtree(shards)
    return pair, made


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _resume_or_begin(
    paths: Sequence[str], work: Path, tokenizer: TextTokenizer, *, field: str, skip_damaged: bool
) -> TokenizePlan:
    resumed = (work / PLAN_FILE).exists()
    if not resumed:
        with convert_os_errors(work, "create"):
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
        with convert_os_errors(work, "write"):
            (work / "tokenizer.json").write_text(tokenizer.json, encoding="utf-8")
            partial = work / f"{PLAN_FILE}.partial"
            partial.write_bytes(msgspec.json.encode(plan))
            partial.replace(work / PLAN_FILE)
    return plan


def _same(work: Path, plan: TokenizePlan) -> bool:
    try:
        return read_plan(work) == plan
    except msgspec.MsgspecError:
        return False


def _plan(
    paths: Sequence[str], work: Path, tokenizer: TextTokenizer, *, field: str, skip_damaged: bool
) -> TokenizePlan:
    given = [_written(path, work) if is_builtin(path) else Path(path) for path in paths]
    files = list_files(given)
    if not files:
        raise InputError([Problem("", "no text was given", "name files or folders")])
    with convert_os_errors(work, "read"):
        stats = [file.stat() for file in files]
    inputs = tuple(
        InputFile(path=str(file.absolute()), size_bytes=stat.st_size, modified_ns=stat.st_mtime_ns)
        for file, stat in zip(files, stats, strict=True)
    )
    whole = sum(one.size_bytes for one in inputs)
    size = min(max(MIN_SHARD_BYTES, whole // MAX_SHARDS), MAX_SHARD_BYTES)
    cut = [one for file in files for one in split_file(file.absolute(), size)]
    return TokenizePlan(
        inputs=inputs,
        shards=tuple(_grouped(cut, size)),
        text_field=field,
        skip_damaged=skip_damaged,
        vocabulary=tokenizer.vocabulary,
    )


def _written(path: str, work: Path) -> Path:
    """Write the built-in text once, so that a run that goes on reads the same."""
    limit = parse_builtin_bytes(path)
    file = work / f"builtin-{limit}.jsonl"
    if not file.exists():
        write_builtin_text(file, limit)
    return file


def _grouped(cut: list[TextSlice], size: int) -> list[tuple[TextSlice, ...]]:
    """Put neighbours together until they are worth a file of tokens."""
    found: list[tuple[TextSlice, ...]] = []
    group: list[TextSlice] = []
    held = 0
    for one in cut:
        if group and held + one.size_bytes > size:
            found.append(tuple(group))
            group, held = [], 0
        group.append(one)
        held += one.size_bytes
    return [*found, tuple(group)] if group else found


def _finish(work: Path, out: Path, plan: TokenizePlan) -> TokenizeResult:
    """Join what the parts left, and give the folder its name."""
    parts = range(len(plan.shards))
    with convert_os_errors(work, "read"):
        done = [
            msgspec.json.decode(get_done_file(work, n).read_bytes(), type=ShardDone) for n in parts
        ]
    with convert_os_errors(work, "write"), (work / DOCUMENTS_FILE).open("wb") as opened:
        crc32, at = _write(opened, np.zeros(1, "<i8"), 0), 0
        for part in parts:
            lengths = np.fromfile(get_lengths_file(work, part), "<i8")
            crc32 = _write(opened, np.cumsum(lengths) + at, crc32)
            at += int(lengths.sum())
    if not at:
        shutil.rmtree(work, ignore_errors=True)
        left_out = sum(one.skipped_documents for one in done)
        what = "hold no text" + (f": {left_out:,} damaged documents were left out" * bool(left_out))
        raise InputError([Problem("texts", what, "name files with text in them")])
    index = TokenShardIndex(
        dtype=plan.vocabulary.dtype,
        documents=sum(one.shard.documents for one in done),
        tokens=at,
        documents_crc32=crc32,
        shards=tuple(one.shard for one in done if one.shard.tokens),
        vocabulary=plan.vocabulary,
        text_bytes=sum(one.text_bytes for one in done),
        skipped=sum(one.skipped_documents for one in done),
    )
    with convert_os_errors(work, "write"):
        (work / INDEX_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=2))
        keep = {
            INDEX_FILE,
            DOCUMENTS_FILE,
            "tokenizer.json",
            *(shard.file for shard in index.shards),
        }
        for file in work.iterdir():
            if file.name in keep:
                _to_disk(file)
            else:
                file.unlink()
        work.rename(out)
    fsync_folder(out.absolute().parent)
    first = next((one.first_skipped for one in done if one.first_skipped), "")
    return TokenizeResult(index.documents, index.tokens, index.text_bytes, index.skipped, first)


def _write(opened: IO[bytes], numbers: Ints, crc32: int) -> int:
    data = numbers.astype("<i8").tobytes()
    opened.write(data)
    return zlib.crc32(data, crc32)


def _to_disk(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
