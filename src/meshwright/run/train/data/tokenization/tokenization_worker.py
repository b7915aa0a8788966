"""One part of the work of tokenizing: some slices of text become one file of tokens.

Also the line protocol of a process that does such parts: numbers of parts come in on stdin, what
became of each goes out on stdout as JSON, until stdin ends.

    python -m meshwright.run.train.data.tokenization.tokenization_worker FOLDER
"""

import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, Problem
from meshwright.file_errors import convert_os_errors
from meshwright.run.train.data.corpus.corpus import Tokens
from meshwright.run.train.data.corpus.token_shards import TokenShard
from meshwright.run.train.data.corpus.vocabulary import Vocabulary
from meshwright.run.train.data.tokenization.text_files import TextSlice, read_documents
from meshwright.run.train.data.tokenization.tokenizer import TextTokenizer, open_saved_tokenizer

PLAN_FILE = "plan.json"
_BATCH_CHARACTERS = 1 << 20
_BATCH_TEXTS = 1024


class InputFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of text as it was when the work was planned."""

    path: str
    size_bytes: int
    modified_ns: int


class TokenizePlan(msgspec.Struct, frozen=True, kw_only=True):
    """All the work there is, and how to do it; equal plans give equal files."""

    inputs: tuple[InputFile, ...]
    shards: tuple[tuple[TextSlice, ...], ...]
    text_field: str
    skip_damaged: bool
    vocabulary: Vocabulary


class ShardDone(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a part."""

    shard: TokenShard
    text_bytes: int
    """UTF-8 bytes of its text."""
    skipped_documents: int = 0
    first_skipped: str = ""
    """The first fault that was passed over."""


class ShardRejected(msgspec.Struct, frozen=True, kw_only=True):
    """Why a part could not be done."""

    problems: tuple[Problem, ...]


def get_lengths_file(folder: Path, part: int) -> Path:
    """Return the file of how long each document of a part is."""
    return folder / f"{part:05d}.lengths"


def get_done_file(folder: Path, part: int) -> Path:
    """Return the file whose being there says that a part is done."""
    return folder / f"{part:05d}.json"


def tokenize_shard(
    folder: Path, plan: TokenizePlan, part: int, tokenizer: TextTokenizer
) -> ShardDone:
    """Tokenize one part; its files take their names when they are whole."""
    name = f"{part:05d}.tokens"
    # A process of an earlier run that was killed may still be at it: none writes another's file.
    partial = folder / f"{name}.{os.getpid()}.partial"
    lengths: list[NDArray[np.int64]] = []
    skips = _Skips(skip=plan.skip_damaged)
    crc32 = tokens = text_bytes = 0
    with convert_os_errors(folder / name, "write"), partial.open("wb") as opened:
        for batch in _batches(plan.shards[part], plan.text_field, skips):
            block, sizes = _encoded(batch, tokenizer)
            data = block.tobytes()
            crc32 = zlib.crc32(data, crc32)
            opened.write(data)
            lengths.append(sizes)
            tokens += len(block)
            text_bytes += sum(map(_size, batch))
    every = np.concatenate([np.empty(0, np.int64), *lengths]).astype("<i8")
    with convert_os_errors(folder / name, "write"):
        partial.replace(folder / name)
        every.tofile(partial)
        partial.replace(get_lengths_file(folder, part))
    shard = TokenShard(file=name, documents=len(every), tokens=tokens, crc32=crc32)
    done = ShardDone(
        shard=shard, text_bytes=text_bytes, skipped_documents=skips.count, first_skipped=skips.first
    )
    with convert_os_errors(folder / name, "write"):
        partial.write_bytes(msgspec.json.encode(done))
        partial.replace(get_done_file(folder, part))
    return done


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


class _Skips:
    """Counts damaged documents, or refuses the first."""

    def __init__(self, *, skip: bool) -> None:
        self._skip = skip
        self.count = 0
        self.first = ""

    def add(self, problem: Problem) -> None:
        if not self._skip:
            raise InputError([problem])
        self.count += 1
        self.first = self.first or str(problem)


def _batches(part: tuple[TextSlice, ...], field: str, skips: _Skips) -> Iterator[list[str]]:
    """Yield the documents in lists that are worth a call of the tokenizer."""
    batch: list[str] = []
    held = 0
    for one in part:
        for text in read_documents(one, field):
            if isinstance(text, Problem):
                skips.add(text)
                continue
            if not text:
                continue
            batch.append(text)
            held += len(text)
            if held >= _BATCH_CHARACTERS or len(batch) >= _BATCH_TEXTS:
                yield batch
                batch, held = [], 0
    if batch:
        yield batch


def _encoded(batch: list[str], tokenizer: TextTokenizer) -> tuple[Tokens, NDArray[np.int64]]:
    """Return the tokens of documents end to end, with their ends marked, and their lengths."""
    vocabulary = tokenizer.vocabulary
    dtype = np.dtype(vocabulary.dtype).newbyteorder("<")
    head = [] if vocabulary.bos is None else [np.array([vocabulary.bos])]
    tail = np.array([vocabulary.eos])
    found = tokenizer.encode(batch)
    rows = [row for ids in found for row in (*head, ids, tail)]
    sizes = np.array([len(ids) + len(head) + 1 for ids in found], np.int64)
    return np.concatenate(rows).astype(dtype), sizes


def read_plan(folder: Path) -> TokenizePlan:
    """Read the plan of a folder."""
    with convert_os_errors(folder / PLAN_FILE, "read"):
        return msgspec.json.decode((folder / PLAN_FILE).read_bytes(), type=TokenizePlan)


def run_worker() -> None:
    """Do the parts whose numbers come in."""
    folder = Path(sys.argv[1])
    plan = read_plan(folder)
    tokenizer = open_saved_tokenizer(folder, plan.vocabulary)
    for line in sys.stdin:
        answer: ShardDone | ShardRejected
        try:
            answer = tokenize_shard(folder, plan, int(line), tokenizer)
        except InputError as error:
            answer = ShardRejected(problems=error.problems)
        kind = type(answer).__name__.encode()
        sys.stdout.buffer.write(kind + b" " + msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    run_worker()
