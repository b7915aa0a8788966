r"""Megatron's indexed format, `.bin` and `.idx`, read and written.

The layout is that of megatron-core 0.16.1 (`core/datasets/indexed_dataset.py`), little-endian:

    .bin   ids, one sequence after the other
    .idx   9 bytes `MMIDIDX\0\0`, u64 version 1, u8 code of the number format,
           u64 sequences S, u64 entries D of the document index,
           int32[S] tokens of each sequence, int64[S] its first byte in the .bin,
           int64[D] sequence at which each document starts, and S at the end;
           with multimodal data int8[S] modes, which are not read

A document is what the document index says: usually one sequence, several where text was split into
sentences.
"""

import struct
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.file_errors import convert_os_errors, make_parent_folder
from meshwright.run.train.data.corpus.corpus import Corpus, Ints, Tokens
from meshwright.run.train.data.corpus.corpus_verification import CorpusCheck
from meshwright.run.train.data.corpus.token_shards import map_tokens
from meshwright.run.train.data.fingerprint import compute_fingerprint

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Codes of the whole-number formats; 6 and 7 are float64 and float32, no ids."""
_FIX = "make the pair of files again, or copy it again"
_SAMPLED_BYTES = 1 << 20


class MegatronFiles(NamedTuple):
    """The two files of a prefix."""

    tokens: Path
    documents: Path


def find_megatron_files(path: Path) -> MegatronFiles | None:
    """Return the files that a prefix, or one of the two files, stands for; None where not both."""
    stem = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    found = MegatronFiles(stem.with_name(f"{stem.name}.bin"), stem.with_name(f"{stem.name}.idx"))
    return found if found.tokens.is_file() and found.documents.is_file() else None


def open_megatron(path: Path) -> Corpus:
    """Open a pair of files; headers and sizes are checked, and every span when it is read."""
    pair = find_megatron_files(path)
    if pair is None:
        what = "there are no .bin and .idx files of this name"
        raise InputError([Problem(str(path), what, "give their common prefix")])
    index = _read_index(pair)
    itemsize = index.dtype.itemsize

    def spans(documents: Ints) -> tuple[Ints, Ints]:
        first, after = index.documents[documents], index.documents[documents + 1]
        if (first > after).any() or (after > len(index.lengths)).any() or (first < 0).any():
            raise _damaged(pair.documents, "its documents are not in order")
        some = after > first
        if not len(index.lengths):
            return np.zeros(len(documents), np.int64), np.zeros(len(documents), np.int64)
        last = np.maximum(after - 1, 0)
        head = np.minimum(first, len(index.lengths) - 1)
        starts = index.pointers[head] // itemsize
        ends = index.pointers[last] // itemsize + index.lengths[last]
        return starts, np.where(some, ends - starts, 0)

    return Corpus(
        name=str(pair.documents.with_suffix("")),
        format="megatron",
        num_documents=len(index.documents) - 1,
        num_tokens=pair.tokens.stat().st_size // itemsize,
        dtype=index.dtype,
        token_arrays=(map_tokens(pair.tokens, index.dtype.name),),
        array_offsets=np.zeros(1, np.int64),
        lookup_documents=spans,
        fingerprint=_fingerprint(pair),
        checks=(
            CorpusCheck(pair.documents.absolute(), "structure", partial(check_megatron, path)),
        ),
    )


class _Index(NamedTuple):
    dtype: np.dtype[Any]
    lengths: NDArray[np.int32]
    pointers: Ints
    documents: Ints


def _read_index(pair: MegatronFiles) -> _Index:
    with convert_os_errors(pair.documents, "read"):
        size = pair.documents.stat().st_size
        with pair.documents.open("rb") as opened:
            head = opened.read(_HEADER.size)
    if len(head) < _HEADER.size:
        raise _damaged(pair.documents, f"ends after {len(head)} bytes, within its header")
    magic, version, code, sequences, documents = _HEADER.unpack(head)
    if magic != MAGIC:
        raise _damaged(pair.documents, f"begins with {magic[:7]!r}, not {MAGIC[:7]!r}")
    if version != 1:
        raise _damaged(pair.documents, f"has version {version}, of which nothing is known")
    if code not in _CODES:
        raise _damaged(pair.documents, f"holds values of dtype code {code}, which are no token ids")
    whole = _HEADER.size + 12 * sequences + 8 * documents
    if size not in (whole, whole + sequences) or not documents:
        what = f"has {size:,} bytes where its header promises {whole:,}"
        raise _damaged(pair.documents, what)
    raw: NDArray[np.uint8] = np.memmap(pair.documents, np.uint8, "r")
    ends = np.cumsum([_HEADER.size, 4 * sequences, 8 * sequences, 8 * documents])
    lengths, pointers, starts = (
        np.frombuffer(raw[begin:end], kind)
        for begin, end, kind in zip(ends[:-1], ends[1:], ("<i4", "<i8", "<i8"), strict=True)
    )
    index = _Index(np.dtype(_CODES[code]), lengths, pointers, starts)
    _check_ends(pair, index)
    return index


def _check_ends(pair: MegatronFiles, index: _Index) -> None:
    """Hold the first and last entries against the size of the tokens: a cut file shows there."""
    if index.documents[0] != 0 or index.documents[-1] != len(index.lengths):
        what = f"its documents do not span its {len(index.lengths):,} sequences"
        raise _damaged(pair.documents, what)
    with convert_os_errors(pair.tokens, "read"):
        size = pair.tokens.stat().st_size
    needed = 0
    if len(index.lengths):
        needed = int(index.pointers[-1]) + int(index.lengths[-1]) * index.dtype.itemsize
    if size != needed:
        what = f"has {size:,} bytes where its index says {needed:,}"
        raise _damaged(pair.tokens, what)


def check_megatron(path: Path) -> list[Problem]:
    """Read the whole index and return what is wrong; the format has no checksums of tokens."""
    pair = find_megatron_files(path)
    assert pair is not None, "it was opened"
    index = _read_index(pair)
    sizes = index.lengths.astype(np.int64) * index.dtype.itemsize
    wrong = {
        "a sequence of negative length": (index.lengths < 0).any(),
        "documents out of order": (np.diff(index.documents) < 0).any(),
        "sequences that do not follow each other": (
            index.pointers[1:] != index.pointers[:-1] + sizes[:-1]
        ).any(),
    }
    return [
        Problem(str(pair.documents), f"has {what}", _FIX) for what, found in wrong.items() if found
    ]


def _damaged(file: Path, what: str) -> DamagedFile:
    return DamagedFile([Problem(str(file), what, _FIX)])


def _fingerprint(pair: MegatronFiles) -> str:
    """Hash the sizes, and the beginning and end of both files: reading all would take minutes."""
    parts: list[bytes | int] = []
    for file in pair:
        size = file.stat().st_size
        with file.open("rb") as opened:
            parts += [size, opened.read(_SAMPLED_BYTES)]
            opened.seek(max(0, size - _SAMPLED_BYTES))
            parts.append(opened.read(_SAMPLED_BYTES))
    return compute_fingerprint(*parts)


def write_megatron(corpus: Corpus, prefix: Path) -> MegatronFiles:
    """Write a corpus as a `.bin` and `.idx` that Megatron reads, a sequence to each document.

    The `.idx` takes its name last, so a pair that is there is whole.
    """
    pair = MegatronFiles(
        prefix.with_name(f"{prefix.name}.bin"), prefix.with_name(f"{prefix.name}.idx")
    )
    make_parent_folder(prefix)
    for file in pair:
        if file.exists():
            raise InputError([Problem(str(file), "is there already", "choose another name")])
    code = next(code for code, name in _CODES.items() if name == corpus.dtype.name)
    count = corpus.num_documents
    partial = MegatronFiles(*(file.with_name(f"{file.name}.partial") for file in pair))
    lengths = np.empty(count, "<i4")
    with convert_os_errors(pair.tokens, "write"), partial.tokens.open("wb") as opened:
        at = 0
        for block in _blocks(corpus, lengths):
            block.tofile(opened)
            at += len(block)
    with convert_os_errors(pair.documents, "write"), partial.documents.open("wb") as opened:
        opened.write(_HEADER.pack(MAGIC, 1, code, count, count + 1))
        lengths.tofile(opened)
        pointers = np.cumsum(lengths, dtype=np.int64) - lengths
        (pointers * corpus.dtype.itemsize).astype("<i8").tofile(opened)
        np.arange(count + 1, dtype="<i8").tofile(opened)
    with convert_os_errors(pair.documents, "write"):
        partial.tokens.replace(pair.tokens)
        partial.documents.replace(pair.documents)
    return pair


def _blocks(corpus: Corpus, lengths: NDArray[np.int32]) -> Iterator[Tokens]:
    """Yield the tokens of all documents in order, and note how long each is."""
    for first in range(0, corpus.num_documents, 4096):
        numbers = np.arange(first, min(first + 4096, corpus.num_documents))
        starts, counts = corpus.get_document_spans(numbers)
        if counts.max() > np.iinfo(np.int32).max:
            what = "a document is longer than Megatron's index can say (2³¹ − 1 tokens)"
            raise InputError([Problem(corpus.name, what, "split it into several documents")])
        lengths[numbers] = counts
        block: Tokens = np.empty(int(counts.sum()), corpus.dtype.newbyteorder("<"))
        corpus.copy_spans(starts, counts, block, np.cumsum(counts) - counts)
        yield block
