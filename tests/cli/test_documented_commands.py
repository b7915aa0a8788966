"""Every `mw` command line that is written down somewhere has flags that exist today."""

import argparse
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from meshwright.cli.command_registry import COMMANDS
from meshwright.cli.parser import build_parser, join_words
from meshwright.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
SOURCES = sorted(
    path
    for folder in ("benchmarks", "examples", "scripts", "validation")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".sh", ".toml", ".yaml")
)
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`(mw [^`]+)`")
_FLAG = re.compile(r"`(--[a-z][\w-]*)[^`]*`")
_OTHERS = {
    "--lr", "--make-vocab-size-divisible-by", "--moe-expert-capacity-factor",
    "--moe-token-drop-policy", "--nnodes", "--num-distributed-optimizer-instances",
    "--recompute-", "--section", "--tensor-model-paralel-size", "--window-size",
}  # fmt: skip
"""Flags of Megatron-LM, DeepSpeed and torchrun that pages name, one misspelled on purpose."""
_ENDS = {"|", ">", ">>", "&&", "||", ";", "&", "--"}


def _shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def _flags(command: str) -> frozenset[str]:
    """Return all flags of a command, those of its verbs included."""
    found = set[str]()
    left: list[argparse.ArgumentParser] = [build_parser(command, COMMANDS)]
    while left:
        parser = left.pop()
        found |= parser._option_string_actions.keys()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                left += action.choices.values()
    return frozenset(found)


def _words(line: str) -> list[str]:
    """Return our words of a command line: up to a pipe, a redirection, a remark or a job's own."""
    line = re.sub(r"[\[\]]", " ", re.split(r"\s{3,}", line)[0])
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # an apostrophe of prose
        words = line.split()
    end = next((place for place, word in enumerate(words) if word in _ENDS), len(words))
    return join_words(words[1:end], COMMANDS)


def _fenced(text: str) -> Iterator[str]:
    """Yield the command lines of blocks of code, joined where they go on in the next line."""
    for info, block in _FENCE.findall(text):
        if info.startswith("{mw}"):
            yield f"mw {info.removeprefix('{mw}').strip()}"
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            if found := re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S+ )*(mw .*)", line):
                yield found[1]
    yield from re.findall(r"^    (mw .*)", _FENCE.sub("", text), re.MULTILINE)


def _unknown(line: str) -> list[str]:
    """Return the words of a line that look like flags, and are none of its command's."""
    words = _words(line)
    if not words or words[0] not in COMMANDS:
        return []
    given = (word.partition("=")[0] for word in words[1:] if re.match(r"--[a-z]", word))
    return [flag for flag in given if flag.rstrip(".,;:)…") not in _flags(words[0])]


def _parsed(line: str) -> str:
    """Return what keeps a whole command line from being parsed; empty where nothing does."""
    words = _words(line)
    if not words or words[0] not in COMMANDS or "--help" in words or "…" in line or "[" in line:
        return ", ".join(_unknown(line))
    try:
        _, rest = build_parser(words[0], COMMANDS).parse_known_args(words)
    except InputError as error:
        return str(error)
    # Words without a dash behind a flag are settings such as optimizer.lr=1e-3.
    return ", ".join(word for word in rest if word.startswith("-"))


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_in_help_can_be_parsed(command: str) -> None:
    for example in COMMANDS[command].load().EXAMPLES:
        line = example[example.index("mw ") :].removesuffix(')"')
        assert not (why := _parsed(line)), f"{example}: {why}"


@pytest.mark.parametrize("path", PAGES, ids=_shown)
def test_commands_of_pages_can_be_parsed(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for line in _fenced(text):
        assert not (why := _parsed(line)), f"{line}: {why}"
    for line in _SPAN.findall(text):
        assert not _unknown(line), line


@pytest.mark.parametrize("path", SOURCES, ids=_shown)
def test_commands_in_sources_have_flags_that_exist(path: Path) -> None:
    text = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
    for line in re.findall(r"(?<![\w/.-])mw [a-z][^\n`\"]*", text):
        assert not _unknown(line), line


@cache
def _all_flags() -> frozenset[str]:
    return frozenset().union(*map(_flags, COMMANDS), _OTHERS)


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=_shown)
def test_flags_that_pages_name_exist(path: Path) -> None:
    named = set(_FLAG.findall(path.read_text(encoding="utf-8")))
    assert not named - _all_flags()
