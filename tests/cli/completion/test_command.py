"""Completion offers commands, verbs, flags, their words and the catalog's names."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.cli.command_registry import COMMANDS
from meshwright.cli.completion.command import complete_words


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["mo"], ["models"]),
        (["layout", "ex"], ["export"]),
        (["gpus", "h200"], ["h200-141g-sxm"]),
        (["layout", "check", "--sequence-p"], ["--sequence-parallel"]),
        (["layout", "check", "--precision", "fp8-r"], ["fp8-rowwise"]),
        (["layout", "check", "--cluster", "gb300"], ["gb300-nvl72"]),
        (["layout", "export", "--to", "torcht"], ["torchtitan"]),
        (["nonsense", "x"], []),
    ],
)
def test_words_that_may_follow(typed: list[str], expected: list[str]) -> None:
    assert complete_words(typed, COMMANDS) == expected


def test_nothing_typed_offers_every_command() -> None:
    assert {"models", "layout", "doctor"} <= set(complete_words([], COMMANDS))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_parse_in_their_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    # A stand-in on PATH runs this source tree, installed or not.
    command = tmp_path / "mw"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m meshwright "$@"\n')
    command.chmod(0o755)
    session = (
        f'PATH={tmp_path}:$PATH; eval "$(mw completion bash)"; '
        "COMP_WORDS=(mw gpus h200); COMP_CWORD=2; _mw; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", session], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["h200-141g-sxm"]
