"""The commands that run a model: what they answer, and what they say to mistakes."""

import json
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch", reason="runs a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

from meshwright.cli.main import main
from meshwright.run.nn.huggingface import save
from tests.run.serve.model.small import made, small
from tests.run.serve.model.test_gguf import trained

SMALL = ["--max-length", "64", "--batch-tokens", "64", "--batch-requests", "4", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tokenizer = trained(digits=True)
    save(made(msgspec.structs.replace(small().model, vocab=tokenizer.get_vocab_size())), path)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}"
    )
    return str(path)


def test_prompts_are_continued(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", "ab", "--prompt", "cd", "--temperature", "0", "--max-tokens", "5"]
    assert main(["generate", folder, *words, *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [answer["tokens"] for answer in found["answers"]] == [5, 5]
    assert found["output_tokens"] == 10


def test_drawn_prompts_measure(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--draw", "3", "--prompt-tokens", "4-9", "--max-tokens", "6", "--random-weights"]
    assert main(["generate", folder, *words, *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["output_tokens"] == 18
    assert "answers" not in found


def test_a_conversation_goes_on(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = ["--say", "ab", "--say", "c", "--temperature", "0", "--max-tokens", "4"]
    assert main(["chat", folder, *said, *SMALL, "--json"]) == 0
    messages = json.loads(capsys.readouterr().out)["messages"]
    assert [each["role"] for each in messages] == ["user", "assistant"] * 2
    assert main(["chat", folder, *said, *SMALL]) == 0
    shown = capsys.readouterr().out
    assert shown == "".join(f"{each['content']}\n" for each in messages[1::2])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "nowhere", "--prompt", "a"], "there is no such file or folder"),
        (["generate", "FOLDER", "--prompt", "a", "--top-p", "2"], "top_p"),
        (["generate", "FOLDER", "--prompt", "a", "--seed", "x"], "--seed: 'x' is no whole number"),
        (["generate", "FOLDER", "--prompt", "a", "--batch-tokens", "1"], "leave none"),
        (["generate", "FOLDER", "--draw", "0"], "--draw"),
        (["generate", "FOLDER", "--file", "missing.jsonl"], "missing.jsonl"),
        (["chat", "FOLDER", "--say", "a", "--kv", "int3"], "kv_precision"),
        (["serve", "FOLDER", "--adapter", "poet"], "names no folder"),
        (["serve", "FOLDER", "--port", "70000"], "port"),
        (["serve", "FOLDER", "--random-weights"], "random weights have no words"),
    ],
)
def test_mistakes_are_named(
    words: list[str], said: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [folder if word == "FOLDER" else word for word in words]
    assert main([*given, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


def test_prompts_come_from_files(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('ab\n\n{"prompt": "cd"}\n')
    words = ["--file", str(path), "--temperature", "0", "--max-tokens", "2"]
    assert main(["generate", folder, *words, *SMALL, "--quiet"]) == 0
    assert capsys.readouterr().out
    path.write_text('{"text": 1}\n')
    assert main(["generate", folder, *words, *SMALL]) == 2
    assert "prompts.jsonl:1" in capsys.readouterr().err
