"""Our own format of tokenized text: a folder of plain arrays and one JSON file that says what.

    index.json       format, counts, checksums, tokenizer; written last
    documents        int64, one more than there are documents: first token of each, then the end
    00000.tokens     ids, uint16 or int32; documents in order, none crosses files
    00001.tokens     …
    tokenizer.json   the tokenizer, as the `tokenizers` library reads it

All numbers are little-endian and files have no header, so `numpy.memmap` reads them as they are.
`corpus_tokenization` writes such folders from text, `write_token_shards` from tokens.
"""

import shutil
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.file_errors import convert_os_errors, make_parent_folder
from meshwright.run.train.data.corpus.corpus import Corpus, Ints, Tokens
from meshwright.run.train.data.corpus.corpus_verification import CorpusCheck
from meshwright.run.train.data.corpus.vocabulary import Vocabulary
from meshwright.run.train.data.fingerprint import compute_fingerprint

INDEX_FILE = "index.json"
DOCUMENTS_FILE = "documents"
INDEX_VERSION = 2
"""Goes up with every change of `TokenShardIndex`; a folder of another version is refused."""
_BLOCK_BYTES = 1 << 24


class TokenShard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file of tokens."""

    file: str
    documents: int
    tokens: int
    crc32: int
    """Of the file's bytes."""


class _IndexVersion(msgspec.Struct, frozen=True):
    """What the index of every version has."""

    version: int


class TokenShardIndex(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `index.json` holds."""

    format: Literal["meshwright-tokens"] = "meshwright-tokens"
    version: int = INDEX_VERSION
    dtype: Literal["uint16", "int32"]
    documents: int
    tokens: int
    documents_crc32: int
    """Of the bytes of `documents`."""
    shards: tuple[TokenShard, ...]
    vocabulary: Vocabulary
    text_bytes: int = 0
    """UTF-8 bytes of the text; 0 where it is not known."""
    skipped: int = 0
    """Damaged documents that were left out, as was asked."""


def is_token_shards(path: Path) -> bool:
    """Tell whether a folder holds tokenized text in our format, whole or not."""
    return (path / INDEX_FILE).is_file()


def open_token_shards(folder: Path) -> Corpus:
    """Open a folder of token shards; check sizes. Its `checks` compare checksums."""
    index = read_index(folder)
    itemsize = np.dtype(index.dtype).itemsize
    problems = [
        *_size_problems(folder / DOCUMENTS_FILE, 8 * (index.documents + 1)),
        *(
            problem
            for shard in index.shards
            for problem in _size_problems(folder / shard.file, itemsize * shard.tokens)
        ),
        *_count_problems(folder, index),
    ]
    if problems:
        raise DamagedFile(problems)
    starts: Ints = np.asarray(np.memmap(folder / DOCUMENTS_FILE, "<i8", "r"))
    counts = np.array([shard.tokens for shard in index.shards], np.int64)

    def spans(documents: Ints) -> tuple[Ints, Ints]:
        first = starts[documents]
        return first, starts[documents + 1] - first

    return Corpus(
        name=str(folder),
        format="shards",
        num_documents=index.documents,
        num_tokens=index.tokens,
        dtype=np.dtype(index.dtype),
        token_arrays=tuple(map_tokens(folder / shard.file, index.dtype) for shard in index.shards),
        array_offsets=np.cumsum(counts) - counts,
        lookup_documents=spans,
        fingerprint=compute_fingerprint(msgspec.json.encode(index)),
        vocabulary=index.vocabulary,
        text_bytes=index.text_bytes,
        checks=tuple(_list_checks(folder, index)),
    )


def map_tokens(file: Path, dtype: str) -> Tokens:
    """Map a file of tokens into memory; one without tokens is an empty array."""
    little = np.dtype(dtype).newbyteorder("<")
    if not file.stat().st_size:
        return np.empty(0, little)
    mapped: Tokens = np.memmap(file, little, "r")
    # A plain array over the same pages: slices of it cost half of those of a memmap.
    return np.asarray(mapped)


def write_token_shards(
    documents: Iterable[Tokens], folder: Path, vocabulary: Vocabulary, *, shard_bytes: int = 1 << 30
) -> Corpus:
    """Write documents that are tokens already; the folder appears whole or not at all."""
    if folder.exists():
        raise InputError([Problem(str(folder), "is there already", "choose another name")])
    make_parent_folder(folder)
    work = folder.with_name(f"{folder.name}.partial")
    dtype = np.dtype(vocabulary.dtype).newbyteorder("<")
    lengths = [0]
    shards: list[TokenShard] = []
    with convert_os_errors(work, "write"):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        waiting = iter(documents)
        while (first := next(waiting, None)) is not None:
            file, before = work / f"{len(shards):05d}.tokens", len(lengths)
            with file.open("wb") as opened:
                for document in chain([first], waiting):
                    opened.write(document.astype(dtype).tobytes())
                    lengths.append(len(document))
                    if opened.tell() >= shard_bytes:
                        break
                tokens = opened.tell() // dtype.itemsize
            count = len(lengths) - before
            shards.append(
                TokenShard(
                    file=file.name, documents=count, tokens=tokens, crc32=compute_file_crc32(file)
                )
            )
        np.cumsum(lengths, dtype="<i8").tofile(work / DOCUMENTS_FILE)
        index = TokenShardIndex(
            dtype=vocabulary.dtype,
            documents=len(lengths) - 1,
            tokens=sum(lengths),
            documents_crc32=compute_file_crc32(work / DOCUMENTS_FILE),
            shards=tuple(shards),
            vocabulary=vocabulary,
        )
        (work / INDEX_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(index), indent=2))
        work.rename(folder)
    return open_token_shards(folder)


def read_index(folder: Path) -> TokenShardIndex:
    """Read what `index.json` says."""
    file = folder / INDEX_FILE
    with convert_os_errors(file, "read"):
        text = file.read_bytes()
    try:
        version = msgspec.json.decode(text, type=_IndexVersion).version
        if version != INDEX_VERSION:
            what = f"has version {version}, and this release reads {INDEX_VERSION}"
            raise InputError([Problem(str(file), what, "tokenize the text again")])
        return msgspec.json.decode(text, type=TokenShardIndex)
    except msgspec.MsgspecError as error:
        what = f"is not the index of tokenized text: {error}"
        raise DamagedFile([Problem(str(file), what, "tokenize the text again")]) from None


def check_token_shards(folder: Path) -> list[Problem]:
    """Read every byte and return which files do not hold what was written."""
    checks = _list_checks(folder, read_index(folder))
    return [problem for check in checks for problem in check.find_problems()]


def _list_checks(folder: Path, index: TokenShardIndex) -> Iterator[CorpusCheck]:
    expected = {DOCUMENTS_FILE: index.documents_crc32}
    expected |= {shard.file: shard.crc32 for shard in index.shards}
    for name, crc32 in expected.items():
        file = (folder / name).absolute()
        yield CorpusCheck(file, f"{crc32:08x}", partial(_find_changes, folder / name, crc32))


def _find_changes(file: Path, crc32: int) -> list[Problem]:
    if compute_file_crc32(file) == crc32:
        return []
    return [Problem(str(file), "its bytes have changed (CRC-32)", "tokenize the text again")]


def compute_file_crc32(file: Path) -> int:
    """Return the CRC-32 of a file."""
    found = 0
    with convert_os_errors(file, "read"), file.open("rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            found = zlib.crc32(block, found)
    return found


def _size_problems(file: Path, expected: int) -> list[Problem]:
    try:
        size = file.stat().st_size
    except FileNotFoundError:
        return [Problem(str(file), "is missing", "tokenize the text again")]
    except OSError as error:
        raise InputError([Problem(str(file), f"cannot read: {error.strerror}", "")]) from None
    if size == expected:
        return []
    what = f"has {size:,} bytes where the index says {expected:,}"
    return [Problem(str(file), what, "tokenize the text again")]


def _count_problems(folder: Path, index: TokenShardIndex) -> list[Problem]:
    sums = {
        "documents": sum(shard.documents for shard in index.shards),
        "tokens": sum(shard.tokens for shard in index.shards),
    }
    return [
        Problem(
            str(folder / INDEX_FILE),
            f"says {getattr(index, name):,} {name}, its shards hold {found:,}",
            "tokenize the text again",
        )
        for name, found in sums.items()
        if found != getattr(index, name)
    ]
