"""Text becomes shards: the same for any number of processes, and after any interruption."""

import json
import shutil
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.run.train.data import open_corpus, open_tokenizer, tokenize_files
from meshwright.run.train.data.corpus.vocabulary import BOS_TOKEN
from meshwright.run.train.data.tokenization import corpus_tokenization, worker_pool
from meshwright.run.train.data.tokenization.corpus_tokenization import (
    count_text_bytes,
    read_all_documents,
    tokenize_to_megatron,
)
from meshwright.run.train.data.tokenization.tokenization_worker import (
    get_done_file,
    read_plan,
    tokenize_shard,
)

BYTES = open_tokenizer("bytes")
DOCUMENTS = [f"document {number}: " + "text " * (number % 17) for number in range(400)]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Text of several parts, were parts as small as that."""
    monkeypatch.setattr(corpus_tokenization, "MIN_SHARD_BYTES", 4000)
    file = tmp_path / "text.jsonl"
    file.write_text("".join(json.dumps({"text": one}) + "\n" for one in DOCUMENTS))
    return str(file)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_documents_end_with_the_end_token(text: str, tmp_path: Path) -> None:
    made = tokenize_files([text], tmp_path / "out", BYTES, workers=1)
    corpus = open_corpus(str(tmp_path / "out"))
    assert made.documents == corpus.num_documents == len(DOCUMENTS)
    assert made.tokens == corpus.num_tokens == sum(len(one) + 1 for one in DOCUMENTS)
    assert made.text_bytes == corpus.text_bytes == sum(len(one) for one in DOCUMENTS)
    assert len(corpus.token_arrays) > 3
    for number in (0, 7, 399):
        assert corpus.read_document(number).tolist() == [*DOCUMENTS[number].encode(), 257]


def test_documents_begin_with_a_token_where_one_is_named(text: str, tmp_path: Path) -> None:
    tokenize_files([text], tmp_path / "out", open_tokenizer("bytes", begin=BOS_TOKEN), workers=1)
    first = open_corpus(str(tmp_path / "out")).read_document(0)
    assert first.tolist() == [256, *DOCUMENTS[0].encode(), 257]


def test_processes_make_the_same_files_as_one(text: str, tmp_path: Path) -> None:
    told: list[int] = []
    tokenize_files([text], tmp_path / "one", BYTES, workers=1)
    tokenize_files([text], tmp_path / "two", BYTES, workers=2, progress=told.append)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert sum(told) == count_text_bytes([text]) == Path(text).stat().st_size


def test_the_folder_holds_what_is_documented(text: str, tmp_path: Path) -> None:
    tokenize_files([text], tmp_path / "out", BYTES, workers=1)
    names = set(contents(tmp_path / "out"))
    assert {"index.json", "documents", "tokenizer.json", "00000.tokens"} <= names
    assert all(name.endswith((".tokens", ".json")) or name == "documents" for name in names)
    assert not (tmp_path / "out.partial").exists()


def stop_after(parts: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Interrupt the work after some parts; returns the list of parts that were begun."""
    begun: list[int] = []

    def interrupted(*args: object) -> object:
        if len(begun) == parts:
            raise KeyboardInterrupt
        begun.append(args[2])  # type: ignore[arg-type]
        return tokenize_shard(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(corpus_tokenization, "tokenize_shard", interrupted)
    return begun


def test_a_run_that_was_stopped_goes_on_where_it_was(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenize_files([text], tmp_path / "whole", BYTES, workers=1)
    stop_after(2, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        tokenize_files([text], tmp_path / "out", BYTES, workers=1)
    assert not (tmp_path / "out").exists()
    work = tmp_path / "out.partial"
    (work / "00002.tokens.partial").write_bytes(b"half a")
    begun = stop_after(100, monkeypatch)
    tokenize_files([text], tmp_path / "out", BYTES, workers=1)
    assert begun == list(range(2, 2 + len(begun)))
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_unfinished_work_with_other_text_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(1, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        tokenize_files([text], tmp_path / "out", BYTES, workers=1)
    with Path(text).open("a") as opened:
        opened.write('{"text": "more"}\n')
    with pytest.raises(InputError, match=r"remove out\.partial"):
        tokenize_files([text], tmp_path / "out", BYTES, workers=1)


def test_a_fault_can_be_mended_with_another_flag(text: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="name another field"):
        tokenize_files([text], tmp_path / "out", BYTES, field="body", workers=1)
    assert tokenize_files([text], tmp_path / "out", BYTES, workers=1).documents == len(DOCUMENTS)


def test_files_without_text_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(InputError, match="hold no text"):
        tokenize_files([str(empty)], tmp_path / "out", BYTES)
    assert list(tmp_path.iterdir()) == [empty]


def test_a_folder_that_is_there_is_never_written_over(text: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="is there already"):
        tokenize_files([text], tmp_path / "out", BYTES)


def test_a_damaged_document_stops_it_with_its_place(text: str, tmp_path: Path) -> None:
    with Path(text).open("a") as opened:
        opened.write('{"text": bad}\n{"text": "good"}\n')
    for count in (1, 2):
        with pytest.raises(InputError, match=r"text\.jsonl: the line at byte"):
            tokenize_files([text], tmp_path / f"out{count}", BYTES, workers=count)


def test_damaged_documents_are_skipped_and_counted_when_asked(text: str, tmp_path: Path) -> None:
    with Path(text).open("a") as opened:
        opened.write('{"text": bad}\n{"text": "good"}\n{}\n')
    made = tokenize_files([text], tmp_path / "out", BYTES, skip_damaged=True, workers=2)
    assert (made.documents, made.skipped) == (len(DOCUMENTS) + 1, 2)
    assert "the line at byte" in made.first_skipped


def test_a_process_that_dies_is_told_and_its_work_can_go_on(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "_MODULE", "meshwright.run.train.data.no_such_module")
    with pytest.raises(InputError, match="ended with exit code 1"):
        tokenize_files([text], tmp_path / "out", BYTES, workers=2)
    monkeypatch.undo()
    monkeypatch.setattr(corpus_tokenization, "MIN_SHARD_BYTES", 4000)
    assert tokenize_files([text], tmp_path / "out", BYTES, workers=1).documents == len(DOCUMENTS)


def test_a_part_is_done_when_its_note_is_there(text: str, tmp_path: Path) -> None:
    shutil.copy(text, tmp_path / "other.jsonl")
    with pytest.raises(InputError):
        tokenize_files(
            [str(tmp_path / "other.jsonl")], tmp_path / "out", BYTES, field="none", workers=1
        )
    work = tmp_path / "out.partial"
    assert len(read_plan(work).shards) > 1
    assert not get_done_file(work, 0).exists()


def test_a_text_that_is_not_there_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        tokenize_files([str(tmp_path / "nowhere")], tmp_path / "out", BYTES)
    assert list(tmp_path.iterdir()) == []


def test_empty_documents_leave_no_token(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    assert tokenize_files([str(tmp_path / "a.jsonl")], tmp_path / "out", BYTES).tokens == 2


def test_megatron_files_take_the_place_of_shards(text: str, tmp_path: Path) -> None:
    pair, made = tokenize_to_megatron([text], tmp_path / "data", BYTES, workers=1)
    assert pair.tokens == tmp_path / "data.bin"
    corpus = open_corpus(str(tmp_path / "data"))
    assert (corpus.num_documents, corpus.num_tokens) == (made.documents, made.tokens)
    assert corpus.read_document(9).tolist() == [*DOCUMENTS[9].encode(), 257]
    assert {path.name for path in tmp_path.iterdir()} == {"text.jsonl", "data.bin", "data.idx"}


def test_texts_are_read_without_tokens(text: str) -> None:
    assert list(read_all_documents([text])) == DOCUMENTS
    with pytest.raises(InputError, match="body"):
        list(read_all_documents([text], "body"))
    assert count_text_bytes(["builtin:2MB", text]) == 2_000_000 + Path(text).stat().st_size
