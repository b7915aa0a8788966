"""Our format on disk: what is documented is read, what is damaged is told."""

import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.errors import DamagedFile, InputError
from meshwright.run.train.data import Vocabulary, open_corpus, write_token_shards
from meshwright.run.train.data.corpus_loader import check_corpus
from tests.run.train.data.conftest import Open, Write

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9], [10, 11]]


@pytest.mark.parametrize("files", [1, 2, 5])
def test_documents_come_back(corpus: Open, files: int) -> None:
    found = corpus(DOCUMENTS, files=files)
    assert [found.read_document(n).tolist() for n in range(5)] == DOCUMENTS
    starts, lengths = found.get_document_spans(np.array([3, 0, 1]))
    assert starts.tolist() == [4, 0, 3]
    assert lengths.tolist() == [5, 3, 0]


def test_wide_ids_are_read(shards: Write) -> None:
    found = open_corpus(str(shards([[70_000, 2**31 - 1]], dtype="int32")))
    assert found.read_document(0).tolist() == [70_000, 2**31 - 1]


def test_equal_content_has_equal_fingerprints(shards: Write) -> None:
    one = open_corpus(str(shards(DOCUMENTS, name="one")))
    same = open_corpus(str(shards(DOCUMENTS, name="same")))
    other = open_corpus(str(shards([*DOCUMENTS[:-1], [10, 12]], name="other")))
    assert one.fingerprint == same.fingerprint
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize("name", ["documents", "00000.tokens"])
def test_a_file_that_was_cut_is_told(shards: Write, name: str) -> None:
    folder = shards(DOCUMENTS)
    file = folder / name
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(DamagedFile, match=f"{name}: has"):
        open_corpus(str(folder))


def test_every_missing_file_is_told(shards: Write) -> None:
    folder = shards(DOCUMENTS, files=2)
    (folder / "documents").unlink()
    (folder / "00001.tokens").unlink()
    with pytest.raises(DamagedFile) as refused:
        open_corpus(str(folder))
    assert [problem.what for problem in refused.value.problems] == ["is missing"] * 2


def test_an_index_of_an_older_version_is_refused(shards: Write) -> None:
    folder = shards(DOCUMENTS)
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | {"version": 1}))
    with pytest.raises(InputError, match=r"has version 1, and this release reads 2.*tokenize"):
        open_corpus(str(folder))


@pytest.mark.parametrize("change", [{"format": "x"}, {"tokens": "many"}, None])
def test_an_index_that_is_not_ours_is_told(shards: Write, change: dict[str, object] | None) -> None:
    folder = shards(DOCUMENTS)
    index = json.loads((folder / "index.json").read_text())
    text = json.dumps(index | change) if change else "{"
    (folder / "index.json").write_text(text)
    with pytest.raises(DamagedFile, match="not the index"):
        open_corpus(str(folder))


def test_counts_that_disagree_are_told(shards: Write) -> None:
    folder = shards(DOCUMENTS)
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0]["documents"] = 4
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(DamagedFile, match="says 5 documents, its shards hold 4"):
        open_corpus(str(folder))


def test_a_changed_byte_is_found_by_its_checksum(shards: Write) -> None:
    folder = shards(DOCUMENTS)
    assert check_corpus(str(folder)) == []
    data = bytearray((folder / "00000.tokens").read_bytes())
    data[5] ^= 1
    (folder / "00000.tokens").write_bytes(data)
    (problem,) = check_corpus(str(folder))
    assert problem.where.endswith("00000.tokens")


def test_a_span_outside_of_the_tokens_is_never_read(shards: Write) -> None:
    folder = shards(DOCUMENTS)
    starts = np.fromfile(folder / "documents", "<i8")
    starts[3] = 400
    starts.tofile(folder / "documents")
    found = open_corpus(str(folder))
    assert found.read_document(0).tolist() == [1, 2, 3]
    with pytest.raises(DamagedFile, match="document 2 outside"):
        found.read_document(2)


def test_what_is_not_there_says_what_to_do(tmp_path: Path, corpus: Open) -> None:
    with pytest.raises(InputError, match="mw data tokenize wrote"):
        open_corpus(str(tmp_path / "nowhere"))
    (tmp_path / "text.txt").write_text("x")
    with pytest.raises(InputError, match=r"mw data tokenize .*text\.txt --out"):
        open_corpus(str(tmp_path / "text.txt"))
    (tmp_path / "half.partial").mkdir()
    with pytest.raises(InputError, match="tokenization is incomplete"):
        open_corpus(str(tmp_path / "half"))
    with pytest.raises(InputError, match="use 0 to 4"):
        corpus(DOCUMENTS).read_document(5)


def test_tokens_are_written_without_text(tmp_path: Path) -> None:
    vocabulary = Vocabulary(name="mine", size=70_000, digest="d", eos=0)
    documents = [np.array(one, np.int64) for one in DOCUMENTS]
    found = write_token_shards(iter(documents), tmp_path / "out", vocabulary, shard_bytes=16)
    assert len(found.token_arrays) == 3
    assert found.dtype == np.int32
    assert [found.read_document(n).tolist() for n in range(5)] == DOCUMENTS
    assert found.vocabulary == vocabulary
    assert check_corpus(str(tmp_path / "out")) == []
    with pytest.raises(InputError, match="is there already"):
        write_token_shards(documents, tmp_path / "out", vocabulary)
