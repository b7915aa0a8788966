"""The commands that run a model: what they answer, and what they say to mistakes."""

import argparse
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec
import pytest

pytest.importorskip("torch", reason="runs a model")
pytest.importorskip("tokenizers", reason="reads a tokenizer")

from meshwright.cli import main
from meshwright.cli.serve import command
from meshwright.cli.serve.engines import assign_gpus, choose_num_threads, start_engines
from meshwright.errors import InputError
from meshwright.run.nn.huggingface import save_hf_checkpoint
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.server import ServerConfig
from meshwright.run.serve.server.http_server import bind_socket
from tests.run.serve.model.small import made, small
from tests.run.serve.model.test_gguf import trained
from tests.run.serve.served_folders import folder as served_folder

TWO = ["--lora-modules", "one=x", "--lora-modules", "two=y"]
SMALL = [
    "--max-model-len",
    "64",
    "--max-num-batched-tokens",
    "64",
    "--max-num-seqs",
    "4",
    "--device",
    "cpu",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    tokenizer = trained(digits=True)
    save_hf_checkpoint(
        made(msgspec.structs.replace(small().model, vocab=tokenizer.get_vocab_size())), path
    )
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
    words = [
        "--num-prompts",
        "3",
        "--random-input-len",
        "4-9",
        "--max-tokens",
        "6",
        "--load-format",
        "dummy",
    ]
    assert main(["generate", folder, *words, *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["output_tokens"] == 18
    assert "answers" not in found


def test_a_conversation_goes_on(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = ["--message", "ab", "--message", "c", "--temperature", "0", "--max-tokens", "4"]
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
        (["generate", __file__, "--prompt", "a"], "is neither a folder nor a GGUF file"),
        (["generate", str(Path(__file__).parent), "--prompt", "a"], "holds no config.json"),
        (["generate", "FOLDER", "--prompt", "a", "--top-p", "2"], "error: --top-p: "),
        (["generate", "FOLDER", "--prompt", "a", "--seed", "x"], "--seed: 'x' is no whole number"),
        (
            ["generate", "FOLDER", "--prompt", "a", "--random-input-len", "9"],
            "--random-input-len: is",
        ),
        (
            ["generate", "FOLDER", "--prompt", "a", "--num-prompts", "2"],
            "--prompt: prompts are drawn",
        ),
        (
            ["generate", "FOLDER", "--prompt", "a", "--load-format", "dummy"],
            "--load-format: dummy",
        ),
        (
            ["generate", "FOLDER", "--prompt", "a", "--output-file", "b"],
            "--prompt: is not answered",
        ),
        (["generate", "FOLDER", "--output-file", "b"], "--output-file: there is nothing to answer"),
        (["generate", "FOLDER", "--prompt", "a" * 500, "--max-model-len", "64"], "--prompt: "),
        (["generate", "FOLDER", "--prompt", "a", *TWO], "choose with --lora one"),
        (["generate", "FOLDER", "--prompt", "a", *TWO, "--lora", "ten"], "--lora: there is no"),
        (["chat", "FOLDER", "--message", "a", "--lora", "one"], "add --lora-modules one=FOLDER"),
        (["chat", "FOLDER", "--message", "a", *TWO], "choose with --lora one"),
        (
            ["chat", "FOLDER", "--message", "a", "--max-num-batched-tokens", "1"],
            "--max-num-batched-tokens: 1 tokens",
        ),
        (
            ["chat", "FOLDER", "--message", "a", "--max-num-seqs", "9999"],
            "--max-num-batched-tokens: 8192",
        ),
        (
            ["chat", "FOLDER", "--message", "a", "--preemption-mode", "swap"],
            "--num-cpu-blocks: swapping needs",
        ),
        (
            ["chat", "FOLDER", "--message", "a", "--max-model-len", "9999"],
            "--max-model-len: 9,999 is more",
        ),
        (["generate", "FOLDER", "--num-prompts", "0"], "--num-prompts"),
        (["generate", "FOLDER", "--input-file", "missing.jsonl"], "missing.jsonl"),
        (
            ["chat", "FOLDER", "--message", "a", "--kv-cache-dtype", "int3"],
            "error: --kv-cache-dtype: ",
        ),
        (["serve", "FOLDER", "--lora-modules", "poet"], "names no folder"),
        (
            ["serve", "FOLDER", "--lora-modules", "a=x", "--lora-modules", "a=y"],
            "--lora-modules: a is x and y",
        ),
        (
            ["serve", "FOLDER", "--served-model-name", "tiny", "--lora-modules", "tiny=x"],
            "--lora-modules: tiny is the",
        ),
        (["serve", "FOLDER", "--port", "70000"], "error: --port: "),
        (["serve", "FOLDER", "--load-format", "dummy"], "dummy weights have no tokenizer"),
        (["serve", "FOLDER", "--tool-call-parser", "smoke"], "'smoke' is no way to write calls"),
        (["serve", "FOLDER", "--replicas", "0"], "--replicas: there is no engine"),
        (["serve", "FOLDER", "--data-parallel-size", "0"], "--replicas: there is no engine"),
        (
            ["serve", "FOLDER", "--load-balance-method", "round_robin"],
            "--load-balance-method: 'round_robin' is not a choice\n"
            "  hint: did you mean round-robin?",
        ),
        (
            ["serve", "FOLDER", "--prefill-replicas", "1"],
            "give --prefill-replicas and --decode-replicas, or neither",
        ),
        (["serve", "FOLDER", "--replicas", "2", "--no-multiprocessing"], "only one engine fits"),
        (["serve", "FOLDER", "--kv-transfer-backend", "tcp"], "there is no KV transfer"),
        (
            ["serve", "FOLDER", "--startup-timeout", "soon"],
            "--startup-timeout: 'soon' is not a time",
        ),
        (
            ["serve", "FOLDER", "--startup-timeout", "0"],
            "--startup-timeout: 0.0 is not a number from 1",
        ),
        (["serve", "FOLDER", "--api-key-file", "missing.keys"], "missing.keys: cannot read"),
        (
            ["serve", "FOLDER", "--prefill-replicas", "1", "--decode-replicas", "1", "--tp", "2"],
            "KV transfer does not support tensor parallelism",
        ),
        (
            [
                "serve",
                "FOLDER",
                "--prefill-replicas",
                "1",
                "--decode-replicas",
                "1",
                "--num-speculative-tokens",
                "2",
            ],
            "speculative decoding",
        ),
        (
            [
                "serve",
                "FOLDER",
                "--prefill-replicas",
                "1",
                "--decode-replicas",
                "1",
                "--kv-transfer-backend",
                "mail",
            ],
            "'mail' is no KV transfer backend",
        ),
        (
            [
                "serve",
                "FOLDER",
                "--prefill-replicas",
                "1",
                "--decode-replicas",
                "1",
                "--replicas",
                "2",
            ],
            "says how many engines there are",
        ),
    ],
)
def test_mistakes_are_named(
    words: list[str], said: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [folder if word == "FOLDER" else word for word in words]
    if words[0] == "serve" and "--port" not in words:
        given += ["--port", "0"]  # whatever else runs here has the usual one
    assert main([*given, "--device", "cpu"]) == 2
    assert said in capsys.readouterr().err


def test_an_address_is_tried_before_weights_are_read(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read(*_: object) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr("meshwright.cli.serve.command.start_engines", read)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", folder, "--port", port]) == 3
    assert "use another --port" in capsys.readouterr().err
    with ExitStack() as held:
        # Of another server, which reads its weights.
        loading = bind_socket(ServerConfig(model="another", port=0))
        (one,) = [held.enter_context(each) for each in loading]
        assert main(["serve", folder, "--port", str(one.getsockname()[1])]) == 3
    assert "use another --port" in capsys.readouterr().err
    # An address for documentation, which no machine has.
    assert main(["serve", folder, "--host", "192.0.2.1"]) == 3
    assert "as --host" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--max-model-len", "9999"], ["--max-num-batched-tokens", "1"]])
def test_settings_are_checked_before_words_are_read(
    flags: list[str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object) -> None:
        pytest.fail("words were read")

    monkeypatch.setattr("meshwright.run.serve.tokenizer.tokenizer.load_tokenizer", read)
    assert main(["serve", folder, *flags]) == 2


def test_without_nixl_no_parcel_goes_through_it(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    assert (
        main(
            [
                "serve",
                folder,
                "--prefill-replicas",
                "1",
                "--decode-replicas",
                "1",
                "--kv-transfer-backend",
                "nixl",
            ]
        )
        == 3
    )
    assert "meshwright[nixl]" in capsys.readouterr().err


def test_prompts_come_from_files(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('ab\n\n{"prompt": "cd"}\n')
    words = ["--input-file", str(path), "--temperature", "0", "--max-tokens", "2"]
    assert main(["generate", folder, *words, *SMALL, "--quiet"]) == 0
    assert capsys.readouterr().out
    path.write_text('{"text": 1}\n')
    assert main(["generate", folder, *words, *SMALL]) == 2
    assert "prompts.jsonl:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", ["", "{}", "[]", '{"prompt": 5}', '{"prompt": "a", "top_k": "b"}']
)
def test_lines_that_say_nothing_are_named(
    given: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"\n{given}\n")
    wanted = 0 if given == "[]" else 2
    assert main(["generate", folder, "--input-file", str(path), *SMALL, "--quiet"]) == wanted
    if wanted:
        said = f"{path}:2: " if given else f"{path}: holds no prompt"
        assert said in capsys.readouterr().err


def test_without_a_prompt_the_ways_to_give_one_are_named(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["generate", folder, *SMALL]) == 2
    said = capsys.readouterr().err
    assert "--prompt: there is nothing to continue" in said
    assert "--input-file FILE, --num-prompts N" in said


def test_a_line_says_how_its_answer_is_drawn(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('ab\n{"prompt": "ab", "max_tokens": 2, "stop": "~", "id": 7}\n')
    words = ["--input-file", str(path), "--temperature", "0", "--max-tokens", "5"]
    assert main(["generate", folder, *words, *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [answer["tokens"] for answer in found["answers"]] == [5, 2]
    assert main(["generate", folder, *words, *SMALL]) == 0
    shown = capsys.readouterr()
    assert "left aside of the file's lines: id" in shown.out + shown.err
    path.write_text('{"prompt": "ab", "max_tokens": -2}\n')
    assert main(["generate", folder, *words, *SMALL]) == 2
    assert f"{path}:1: max_tokens: -2" in capsys.readouterr().err


def test_an_adapter_that_is_given_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = served_folder("")
    adapter, lines = f"poet={plain / 'adapter'}", tmp_path / "prompts.jsonl"
    again = ["--lora-modules", adapter, "--lora-modules", f"other={plain / 'adapter'}"]
    words = ["generate", str(plain), "--temperature", "0", "--max-tokens", "9", *SMALL, "--json"]
    asked = '{{"prompt": "ab", "adapter": {}}}\n'
    lines.write_text("".join(asked.format(name) for name in ("null", '"poet"', '"other"')))

    def texts(*more: str) -> list[str]:
        assert main([*words, *more]) == 0
        return [each["text"] for each in json.loads(capsys.readouterr().out)["answers"]]

    (base,), (adapted,) = (
        texts("--prompt", "ab"),
        texts("--prompt", "ab", "--lora-modules", adapter),
    )
    assert base != adapted
    assert texts("--prompt", "ab", *again, "--lora", "poet") == [adapted]
    assert texts("--input-file", str(lines), *again) == [base, adapted, adapted]
    lines.write_text(asked.format('"poem"'))
    assert main([*words, "--input-file", str(lines), *again]) == 2
    assert f"{lines}:1: there is no adapter named 'poem'" in capsys.readouterr().err


def test_a_conversation_is_with_the_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(served_folder(""), folder)
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    said = ["--message", "ab", "--temperature", "0", "--max-tokens", "9", *SMALL, "--json"]

    def answer(*more: str) -> str:
        assert main(["chat", str(folder), *said, *more]) == 0
        return str(json.loads(capsys.readouterr().out)["messages"][-1]["content"])

    assert answer() != answer("--lora-modules", f"poet={folder / 'adapter'}")


def test_a_recorded_teacher_may_be_an_adapter(tmp_path: Path) -> None:
    folder, prompts = served_folder(""), tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "ab"}\n')

    def written(*more: str) -> list[int]:
        out = tmp_path / "told.jsonl"
        words = ["--input-file", str(prompts), "--output-file", str(out), "--temperature", "0"]
        assert main(["generate", str(folder), *words, "--max-tokens", "9", *SMALL, *more]) == 0
        found: list[int] = json.loads(out.read_text())["tokens"]
        return found

    assert written() != written("--lora-modules", f"poet={folder / 'adapter'}")


def test_a_rank_too_high_names_the_flag_that_makes_room(
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = served_folder("")
    given = ["--lora-modules", f"poet={folder / 'adapter'}", "--max-lora-rank", "1"]
    assert main(["generate", str(folder), "--prompt", "ab", *given, *SMALL]) == 2
    assert "use --max-lora-rank 2" in capsys.readouterr().err


@contextmanager
def serving(folder: str, *words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `mw serve` as users do; yield its process and its address."""
    command = [sys.executable, "-m", "meshwright", "serve", folder, "--port", "0", *SMALL, *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(r"serving \S+ at (\S+)", line):
                    yield process, found[1]
                    break
            else:
                pytest.fail("it does not begin to serve")
        finally:
            process.kill()


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    sent = Request(f"{url}{path}", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(sent, timeout=60) as got:
        found: dict[str, Any] = json.load(got)
        return found


CHAT = {"messages": [{"role": "user", "content": "ab"}], "temperature": 0, "max_tokens": 5}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--no-multiprocessing",),
        ("--replicas", "2"),
        ("--prefill-replicas", "1", "--decode-replicas", "1"),
    ],
    ids=" ".join,
)
def test_a_served_model_answers_and_ends_in_peace(words: tuple[str, ...], folder: str) -> None:
    with serving(folder, *words) as (process, url):
        said = [ask(url, "/chat/completions", CHAT)["choices"][0] for _ in range(2)]
        assert said[0] == said[1]
        assert said[0]["finish_reason"] in {"length", "stop"}
        body = {"prompt": "abcd", "echo": True, "logprobs": 1, "max_tokens": 0}
        (told,) = ask(url, "/completions", body)["choices"]
        assert told["text"] == "abcd"
        assert told["logprobs"]["token_logprobs"][0] is None
        assert all(each <= 0 for each in told["logprobs"]["token_logprobs"][1:])
        os.kill(process.pid, signal.SIGTERM)
        assert process.stderr is not None
        rest = process.stderr.read()
        assert process.wait(60) == 0
        assert "Traceback" not in rest


def test_a_server_that_starts_ends_at_sigterm_and_not_by_it(folder: str) -> None:
    """Which does nothing to the first process of a container."""
    code = (
        "import os, signal, sys, time\n"
        "from meshwright.cli import main\n"
        "from meshwright.cli.serve import command\n"
        "end = lambda *_: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(60)\n"
        "command.start_engines = end\n"
        f"sys.exit(main(['serve', {folder!r}, '--port', '0', *{SMALL!r}]))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(("blocks", "said"), [("2", "9 tokens, not the 16"), ("64", "")])
def test_a_cache_that_cuts_what_was_asked_is_told(folder: str, blocks: str, said: str) -> None:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    words = [
        "--device",
        "cpu",
        "--no-multiprocessing",
        "--max-model-len",
        "16",
        "--block-size",
        "4",
    ]
    asked = parser.parse_args([folder, *words, "--num-gpu-blocks-override", blocks])
    engine, lines = start_engines(asked, Path(folder))
    assert lines[2:] == [line for line in lines if said and said in line]
    assert engine.max_model_len == (9 if said else 16)


def test_engines_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    one = EngineConfig(device="cpu")
    assert [choose_num_threads([one] * count) for count in (1, 2, 4, 12)] == [None, 3, 1, 1]


def test_engines_get_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    found = assign_gpus(EngineConfig(device="cuda:2", tensor_parallel_size=2), 3)
    assert [each.device for each in found] == ["cuda:2", "cuda:4", "cuda:6"]
    with pytest.raises(InputError, match="need 9, torch sees 8"):
        assign_gpus(EngineConfig(tensor_parallel_size=3), 3)
    assert assign_gpus(EngineConfig(device="cpu"), 2) == [EngineConfig(device="cpu")] * 2
