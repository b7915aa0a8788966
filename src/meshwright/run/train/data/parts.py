"""One part of the work of tokenising: some slices of text become one file of tokens.

Also the line protocol of a process that does such parts: numbers of parts come in on stdin, what
became of each goes out on stdout as JSON, until stdin ends.

    python -m meshwright.run.train.data.parts FOLDER
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
from meshwright.run.train.data.corpus import Tokens
from meshwright.run.train.data.shards import Shard
from meshwright.run.train.data.text import Slice, texts
from meshwright.run.train.data.tokenizer import Tokenizer, kept_tokenizer
from meshwright.run.train.data.vocabulary import Vocabulary
from meshwright.timeline.paths import refusals

PLAN = "plan.json"
_BATCH_CHARACTERS = 1 << 20
_BATCH_TEXTS = 1024


class Input(msgspec.Struct, frozen=True, kw_only=True):
    """A file of text as it was when the work was planned."""

    path: str
    size: int
    modified_ns: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All the work there is, and how to do it; equal plans give equal files."""

    inputs: tuple[Input, ...]
    parts: tuple[tuple[Slice, ...], ...]
    field: str
    skip_damaged: bool
    vocabulary: Vocabulary


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a part."""

    shard: Shard
    text_bytes: int
    """UTF-8 bytes of its text."""
    skipped: int = 0
    first_skipped: str = ""
    """The first fault that was passed over."""


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """Why a part could not be done."""

    problems: tuple[Problem, ...]


def lengths_file(folder: Path, part: int) -> Path:
    """Return the file of how long each document of a part is."""
    return folder / f"{part:05d}.lengths"


def note_file(folder: Path, part: int) -> Path:
    """Return the file whose being there says that a part is done."""
    return folder / f"{part:05d}.json"


def do_part(folder: Path, plan: Plan, part: int, tokenizer: Tokenizer) -> Done:
    """Tokenise one part; its files take their names when they are whole."""
    name = f"{part:05d}.tokens"
    # A process of an earlier run that was killed may still be at it: none writes another's file.
    partial = folder / f"{name}.{os.getpid()}.partial"
    lengths: list[NDArray[np.int64]] = []
    skips = _Skips(skip=plan.skip_damaged)
    crc32 = tokens = text_bytes = 0
    with refusals(folder / name, "written"), partial.open("wb") as opened:
        for batch in _batches(plan.parts[part], plan.field, skips):
            block, sizes = _encoded(batch, tokenizer)
            data = block.tobytes()
            crc32 = zlib.crc32(data, crc32)
            opened.write(data)
            lengths.append(sizes)
            tokens += len(block)
            text_bytes += sum(map(_size, batch))
    every = np.concatenate([np.empty(0, np.int64), *lengths]).astype("<i8")
    with refusals(folder / name, "written"):
        partial.replace(folder / name)
        every.tofile(partial)
        partial.replace(lengths_file(folder, part))
    shard = Shard(file=name, documents=len(every), tokens=tokens, crc32=crc32)
    done = Done(shard=shard, text_bytes=text_bytes, skipped=skips.count, first_skipped=skips.first)
    with refusals(folder / name, "written"):
        partial.write_bytes(msgspec.json.encode(done))
        partial.replace(note_file(folder, part))
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


def _batches(part: tuple[Slice, ...], field: str, skips: _Skips) -> Iterator[list[str]]:
    """Yield the documents in lists that are worth a call of the tokenizer."""
    batch: list[str] = []
    held = 0
    for one in part:
        for text in texts(one, field):
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


def _encoded(batch: list[str], tokenizer: Tokenizer) -> tuple[Tokens, NDArray[np.int64]]:
    """Return the tokens of documents end to end, with their ends marked, and their lengths."""
    vocabulary = tokenizer.vocabulary
    dtype = np.dtype(vocabulary.dtype).newbyteorder("<")
    head = [] if vocabulary.begin is None else [np.array([vocabulary.begin])]
    tail = np.array([vocabulary.end])
    found = tokenizer.encode(batch)
    rows = [row for ids in found for row in (*head, ids, tail)]
    sizes = np.array([len(ids) + len(head) + 1 for ids in found], np.int64)
    return np.concatenate(rows).astype(dtype), sizes


def read_plan(folder: Path) -> Plan:
    """Read the plan of a folder."""
    with refusals(folder / PLAN, "read"):
        return msgspec.json.decode((folder / PLAN).read_bytes(), type=Plan)


def main() -> None:
    """Do the parts whose numbers come in."""
    folder = Path(sys.argv[1])
    plan = read_plan(folder)
    tokenizer = kept_tokenizer(folder, plan.vocabulary)
    for line in sys.stdin:
        answer: Done | Refused
        try:
            answer = do_part(folder, plan, int(line), tokenizer)
        except InputError as error:
            answer = Refused(problems=error.problems)
        kind = type(answer).__name__.encode()
        sys.stdout.buffer.write(kind + b" " + msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
