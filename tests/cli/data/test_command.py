"""`mw data`: text tokenized, looked into and shown."""

import json
from pathlib import Path

import pytest

from meshwright.cli import main

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"document {n} says " + "word " * (n % 20)}) for n in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(lines))
    return tmp_path


def answer(words: str, capsys: Captured, code: int = 0) -> dict[str, object]:
    assert main([*words.split(), "--json"]) == code
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_text_is_tokenized_and_inspected(text: Path, capsys: Captured) -> None:
    made = answer("data tokenize text.jsonl --out tokens", capsys)
    assert made["schema"] == "meshwright.data.tokenize/2"
    found = answer("data inspect tokens --check --sequence-length 64", capsys)
    assert found["schema"] == "meshwright.data.inspect/2"
    assert (found["documents"], found["tokens"]) == (60, made["tokens"])
    assert [one["packing"] for one in found["packings"]] == ["none", "concat", "pack"]  # type: ignore[attr-defined]


def test_damage_is_an_answer(text: Path, capsys: Captured) -> None:
    answer("data tokenize text.jsonl --out tokens", capsys)
    file = text / "tokens" / "00000.tokens"
    file.write_bytes(b"x" + file.read_bytes()[1:])
    found = answer("data inspect tokens --check", capsys, code=1)
    assert len(found["damaged"]) == 1  # type: ignore[arg-type]


def test_a_tokenizer_is_trained_and_used_for_megatron(text: Path, capsys: Captured) -> None:
    pytest.importorskip("tokenizers")
    train = (
        "data train-tokenizer text.jsonl --vocab-size 300 --special-tokens <|user|> --out mine.json"
    )
    assert answer(train, capsys)["schema"] == "meshwright.data.train-tokenizer/2"
    answer("data tokenize text.jsonl --tokenizer mine.json --format megatron --out pair", capsys)
    found = answer("data sample pair --tokenizer mine.json --packing none", capsys)
    assert all("document" in one["text"] for one in found["documents"])  # type: ignore[attr-defined]


@pytest.mark.parametrize("packing", ["none", "concat", "pack"])
def test_a_sample_shows_the_documents_of_a_step(text: Path, capsys: Captured, packing: str) -> None:
    words = f"data sample text.jsonl --packing {packing} --sequence-length 64 --step 2"
    found = answer(words, capsys)
    shown: list[dict[str, object]] = found["documents"]  # type: ignore[assignment]
    assert {one["sequence"] for one in shown} == {0, 1, 2, 3}
    assert all("<|pad|>" not in str(one["text"]) for one in shown)
    if packing != "concat":
        assert all(str(one["text"]).count("<|end_of_text|>") <= 1 for one in shown)


def test_ids_are_shown_where_no_tokenizer_is_known(text: Path, capsys: Captured) -> None:
    answer("data tokenize text.jsonl --format megatron --out pair", capsys)
    assert main(["data", "sample", "pair", "--packing", "none", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("100 111 99 ")


@pytest.mark.parametrize(
    "words",
    [
        "data tokenize text.jsonl --out new/folder/out",
        "data tokenize text.jsonl --format megatron --out new/folder/out",
        "data train-tokenizer text.jsonl --vocab-size 300 --out new/folder/out",
    ],
)
def test_folders_above_what_is_written_are_made(text: Path, words: str) -> None:
    assert main(words.split()) == 0
    assert list(Path("new/folder").iterdir())


def test_a_source_that_is_not_there_leaves_no_folder(text: Path) -> None:
    assert main(["data", "tokenize", "nowhere", "--out", "new/out"]) == 2
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("data tokenize nowhere --out x", "no such file"),
        ("data tokenize text.jsonl --field body --out x", "name another field (text holds text)"),
        ("data tokenize text.jsonl --out text.jsonl/b", "is a file, not a folder"),
        ("data inspect missing.jsonl", "there is no such file"),
        ("data inspect text.jsonl", "mw data tokenize text.jsonl"),
        ("data train-tokenizer text.jsonl --vocab-size 5 --out t.json", "use 259 or more"),
        ("data sampel text.jsonl", "did you mean sample?"),
    ],
)
def test_a_mistake_is_named_with_a_hint(
    text: Path, words: str, hint: str, capsys: Captured
) -> None:
    assert main(words.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert hint in printed.err
    assert "Traceback" not in printed.err
