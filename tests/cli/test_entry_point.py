"""The command line's manners: exit codes, streams, suggestions, no tracebacks."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cli import main
from meshwright.cli.command_registry import COMMANDS

Captured = pytest.CaptureFixture[str]

REQUESTS = ["--cluster", "dgx-h100", "--rate", "5", "--requests", "50"]
ANSWERS = {
    "models": ["models"],
    "model": ["models", "llama3.1-8b"],
    "gpus": ["gpus"],
    "gpu": ["gpus", "h100"],
    "clusters": ["clusters"],
    "cluster": ["clusters", "h100-superpod"],
    "layout.check": ["layout", "check", "examples/llama3-70b.toml"],
    "layout.memory": ["layout", "memory", "examples/llama3-70b.toml"],
    "layout.export": ["layout", "export", "examples/llama3-70b.toml", "--to", "megatron"],
    "simulate": ["simulate", "examples/llama3-70b.toml"],
    "whatif": ["whatif", "examples/llama3-70b.toml", "nic=x2"],
    "simulate.serve": ["simulate", "serve", "llama3.1-8b", *REQUESTS],
    "plan.serve": ["plan", "serve", "llama3.1-8b", *REQUESTS, "--slo", "ttft=1s", "--tp", "1"],
    "validate.training": ["validate", "training"],
    "validate.collectives": ["validate", "collectives"],
    "doctor": ["doctor"],
    "completion": ["completion", "bash"],
}


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])


def test_help_lists_every_command(capsys: Captured) -> None:
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in COMMANDS)


def test_no_command_prints_help(capsys: Captured) -> None:
    assert main([]) == 0
    assert "examples:" in capsys.readouterr().out


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_with_examples(command: str, capsys: Captured) -> None:
    assert main([command, "--help"]) == 0
    assert f"mw {command}" in capsys.readouterr().out


def cost(schema: str) -> list[pytest.MarkDecorator]:
    """Mark what predicts a thousand published runs."""
    return [pytest.mark.slow] if schema == "validate.training" else []


def test_version(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("meshwright ")


@pytest.mark.parametrize(
    ("schema", "words"),
    [pytest.param(schema, words, marks=cost(schema)) for schema, words in ANSWERS.items()],
    ids=ANSWERS,
)
def test_every_answer_has_a_json_form(schema: str, words: list[str], capsys: Captured) -> None:
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert re.fullmatch(rf"meshwright\.{re.escape(schema)}/\d+", answer["schema"])


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=cost(schema)) for schema, words in ANSWERS.items()],
    ids=ANSWERS,
)
def test_quiet_prints_less_but_something(words: list[str], capsys: Captured) -> None:
    main(words)
    full = capsys.readouterr().out
    assert main([*words, "--quiet"]) == 0
    quiet = capsys.readouterr().out
    assert quiet.strip()
    assert len(quiet) <= len(full)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["modles"], "did you mean models?"),
        (["models", "lama3.1-8b"], "llama3.1-8b"),
        (["gpus", "h2000"], "h200"),
        (["clusters", "h100-superpot"], "h100-superpod"),
        (["layout", "chek"], "did you mean check?"),
        (["layout", "check", "--zerro", "1"], "did you mean --zero?"),
        (["launch", "slurm", "job.toml", "--folder", "x"], "see mw launch slurm --help"),
        (["collective", "bench", "--end", "1MB"], "see mw collective bench --help"),
        (["layout", "export", "examples/llama3-70b.toml", "--to", "megatorn"], "megatron"),
        (["layout", "check", "nowhere.toml"], ""),
        (["layout", "check", "--model", "llama3.1-8b"], "add cluster"),
        (
            ["layout", "check", "--model", "llama3.1-8b", "--cluster", "dgx-h100", "--tp", "x"],
            "4096",
        ),
        (["models", "llama3.1-8b", "--sequence-length", "0"], "use 1"),
        (["timeline", "show", "nowhere"], ""),
        (["completion", "tcsh"], "bash"),
    ],
)
def test_a_mistake_is_named_with_a_hint(words: list[str], hint: str, capsys: Captured) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert hint in printed.err
    assert "Traceback" not in printed.err


def test_errors_have_a_json_form(capsys: Captured) -> None:
    assert main(["gpus", "h2000", "--json"]) == 2
    error = json.loads(capsys.readouterr().err)
    assert error["schema"] == "meshwright.error/1"
    assert error["exit_code"] == 2
    assert error["problems"][0]["where"] == "gpu"


WORDS = st.lists(
    st.sampled_from(
        ["models", "gpus", "layout", "check", "memory", "import", "--tp", "--json", "-q", "8", "0",
         "--from", "megatron", "--gpus", "--model", "llama3.1-8b", "--cluster", "h100-superpod",
         "--precision", "fp8", "--", "", "--stage-layers", "1,2", "--zero", "nan", "1e400", "-1"]
    ) | st.text(max_size=6),
    max_size=8,
)  # fmt: skip


@given(WORDS)
def test_no_words_make_a_traceback(words: list[str]) -> None:
    # Standard input would be read for "-", so that word is left to other tests.
    assert main([word for word in words if word != "-"]) in {0, 1, 2, 3}


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"
        ),
    ],
)
def test_a_machine_without_enough_memory_is_no_bug_of_ours(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def fail(_: object) -> None:
        raise error

    monkeypatch.setattr("meshwright.cli.models.command.run", fail)
    assert main(["models"]) == 3
    told = capsys.readouterr().err
    assert "there is not enough memory for this" in told
    assert "bug" not in told


def test_a_reader_that_leaves_early_is_no_error() -> None:
    run = f"{sys.executable} -m meshwright models --json | head -c 10"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", run], capture_output=True, check=False)
    assert done.returncode == 0
    assert done.stderr == b""


def on_a_terminal(*words: str) -> str:
    terminal, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm-256color"}
    with subprocess.Popen(
        [sys.executable, "-m", "meshwright", *words], stdout=child, stderr=child, env=environment
    ) as process:
        os.close(child)
        parts = []
        try:
            while part := os.read(terminal, 65536):
                parts.append(part)
        except OSError:
            pass  # Linux ends a closed terminal with an error
        process.wait()
    os.close(terminal)
    return b"".join(parts).decode()


def test_a_terminal_gets_colours_unless_told_otherwise() -> None:
    assert "\x1b[" in on_a_terminal("gpus")
    assert "\x1b[3" not in on_a_terminal("gpus", "--no-color")


@pytest.mark.parametrize("words", [["models"], ["gpus"], ["clusters"]])
def test_tables_fit_eighty_columns(words: list[str]) -> None:
    lines = on_a_terminal(*words, "--no-color").replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert all(len(line.rstrip()) <= 80 for line in lines.splitlines())


def test_a_pipe_gets_tab_separated_text(capsys: Captured) -> None:
    main(["gpus"])
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("# ")
    assert header.split("\t")[0] == "name"
    assert all(len(row.split("\t")) == len(header.split("\t")) for row in rows)


TOPOLOGIES = Path("tests/spec/cluster/data")


def test_a_cluster_is_read_from_what_a_machine_prints(capsys: Captured) -> None:
    words = ["--topology", str(TOPOLOGIES / "hgx_h100.txt"), "--gpu", "h100", "--nic", "400Gb/s"]
    assert main(["clusters", *words, "--nodes", "4", "--json"]) == 0
    cluster = json.loads(capsys.readouterr().out)["cluster"]
    assert cluster["nodes"] == 4
    assert cluster["nics"]["nic_bytes_per_s"] == 50e9


def test_a_topology_needs_its_gpu(capsys: Captured) -> None:
    assert main(["clusters", "--topology", str(TOPOLOGIES / "hgx_h100.xml")]) == 2
    assert "--gpu h100" in capsys.readouterr().err
