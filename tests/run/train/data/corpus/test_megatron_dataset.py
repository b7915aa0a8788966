"""Megatron's `.bin` and `.idx`, held against megatron-core's own reader and writer."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.errors import DamagedFile, InputError
from meshwright.run.train.data import open_corpus, write_megatron
from meshwright.run.train.data.corpus_loader import check_corpus
from tests.run.train.data.conftest import Open

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9], [10, 11]]


@pytest.fixture
def prefix(corpus: Open, tmp_path: Path) -> Path:
    """A pair of files that we wrote."""
    write_megatron(corpus(DOCUMENTS, files=2), tmp_path / "data")
    return tmp_path / "data"


def theirs() -> Any:
    return pytest.importorskip(
        "megatron.core.datasets.indexed_dataset", reason="needs megatron-core as the reference"
    )


def test_megatron_reads_what_we_write(prefix: Path) -> None:
    found = theirs().IndexedDataset(str(prefix))
    assert [found[n].tolist() for n in range(5)] == DOCUMENTS
    assert found.document_indices.tolist() == list(range(6))
    assert found.index.dtype is np.uint16


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_we_read_what_megatron_writes(tmp_path: Path, dtype: type) -> None:
    torch = pytest.importorskip("torch")
    builder = theirs().IndexedDatasetBuilder(str(tmp_path / "data.bin"), dtype=dtype)
    for document in DOCUMENTS:
        builder.add_item(torch.tensor(document, dtype=torch.int64))
        builder.end_document()
    # A document of two sentences, as text that was split into sentences has.
    builder.add_document([12, 13, 14], [1, 2])
    builder.finalize(str(tmp_path / "data.idx"))
    found = open_corpus(str(tmp_path / "data"))
    assert found.dtype == dtype
    assert [found.read_document(n).tolist() for n in range(6)] == [*DOCUMENTS, [12, 13, 14]]
    assert check_corpus(str(tmp_path / "data")) == []


def test_both_write_the_same_bytes(prefix: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    builder = theirs().IndexedDatasetBuilder(str(tmp_path / "their.bin"), dtype=np.uint16)
    for document in DOCUMENTS:
        builder.add_item(torch.tensor(document, dtype=torch.int64))
        builder.end_document()
    builder.finalize(str(tmp_path / "their.idx"))
    for ending in (".bin", ".idx"):
        ours = prefix.with_suffix(ending).read_bytes()
        assert ours == (tmp_path / f"their{ending}").read_bytes()


@pytest.mark.parametrize("name", ["data", "data.bin", "data.idx"])
def test_the_prefix_or_either_file_may_be_named(prefix: Path, name: str) -> None:
    found = open_corpus(str(prefix.with_name(name)))
    assert [found.read_document(n).tolist() for n in range(5)] == DOCUMENTS


def spoil(file: Path, at: int, data: bytes) -> None:
    whole = bytearray(file.read_bytes())
    whole[at : at + len(data)] = data
    file.write_bytes(whole)


@pytest.mark.parametrize(
    ("at", "data", "what"),
    [
        (0, b"MMIDIDY", "begins with"),
        (9, struct.pack("<Q", 2), "has version 2"),
        (17, b"\x06", "code 6"),
        (18, struct.pack("<Q", 6), "header promises"),
        (26, struct.pack("<Q", 0), "header promises"),
        (34 + 5 * 12, struct.pack("<q", 1), "do not span"),
        (34 + 5 * 12 + 5 * 8, struct.pack("<q", 4), "do not span"),
    ],
)
def test_a_damaged_index_is_told(prefix: Path, at: int, data: bytes, what: str) -> None:
    spoil(prefix.with_suffix(".idx"), at, data)
    with pytest.raises(DamagedFile, match=what):
        open_corpus(str(prefix))


@pytest.mark.parametrize(("ending", "what"), [(".bin", "where its index"), (".idx", "promises")])
def test_a_file_that_was_cut_is_told(prefix: Path, ending: str, what: str) -> None:
    file = prefix.with_suffix(ending)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedFile, match=what):
        open_corpus(str(prefix))


def test_an_index_cut_in_its_header_is_told(prefix: Path) -> None:
    prefix.with_suffix(".idx").write_bytes(b"MMIDIDX\0\0")
    with pytest.raises(DamagedFile, match="within its header"):
        open_corpus(str(prefix))


def test_a_span_outside_of_the_tokens_is_never_read(prefix: Path) -> None:
    spoil(prefix.with_suffix(".idx"), 34 + 5 * 4 + 8 * 2, struct.pack("<q", 4000))
    with pytest.raises(DamagedFile, match="document 2 outside"):
        open_corpus(str(prefix)).read_document(2)
    assert [problem.what for problem in check_corpus(str(prefix))] == [
        "has sequences that do not follow each other"
    ]


def test_documents_out_of_order_are_told(prefix: Path) -> None:
    spoil(prefix.with_suffix(".idx"), 34 + 5 * 12 + 8 * 2, struct.pack("<q", 5))
    with pytest.raises(DamagedFile, match="not in order"):
        open_corpus(str(prefix)).read_document(2)
    assert len(check_corpus(str(prefix))) == 1


def test_a_pair_that_is_there_is_never_written_over(prefix: Path) -> None:
    with pytest.raises(InputError, match="is there already"):
        write_megatron(open_corpus(str(prefix)), prefix)


def test_no_documents_are_a_pair_too(corpus: Open, tmp_path: Path) -> None:
    write_megatron(corpus([]), tmp_path / "none")
    assert open_corpus(str(tmp_path / "none")).num_documents == 0
