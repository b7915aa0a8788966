"""Read command-line flags out of shell text: a line, a list of flags, or a whole launch script.

Quotes, comments, line ends with a backslash, `--flag=value`, arrays and plain variables
(`TP=8 … --tensor-model-parallel-size $TP`) are understood. Nothing is run. What the flags mean is
not known here.
"""

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from meshwright.errors import InputError, Problem

_ASSIGNMENT = re.compile(r"(?s)([A-Za-z_]\w*)\+?=(.*)")
_VARIABLE = re.compile(r"\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
_ARITHMETIC = re.compile(r"\$\(\(\s*(\d{1,9})\s*\*\s*(\d{1,9})\s*\)\)")
_LONG_FLAG = re.compile(r"--[A-Za-z]")
_ENDS = frozenset({"|", "||", "&&", "&", ";", ";;", ")", "2>&1", ">", ">>", "then", "fi", "else"})
_WORLD = re.compile(r"\bWORLD_SIZE=(\d{1,9})\b")


class CommandLine(NamedTuple):
    """What a shell text says."""

    flags: dict[str, list[str]]
    """Each long flag with the words after it; the last mention counts."""
    variables: dict[str, str]
    """Plain assignments."""


def parse_command_line(text: str) -> CommandLine:
    """Return the long flags and the variables of a shell text."""
    words: list[str] = []
    variables: dict[str, str] = {}
    for word in _split(_joined(text)):
        _take(word, words, variables, 0)
    comment = _WORLD.search(text)
    if comment is not None:
        variables.setdefault("WORLD_SIZE", comment[1])
    return CommandLine(_flags(words), variables)


def _joined(text: str) -> str:
    return re.sub(r"\\[ \t]*\r?\n", " ", text)


def _split(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars=False)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError as error:
        what = str(error).rstrip(".").lower()
        raise InputError(
            [Problem("", f"the text breaks shell rules: {what}", "close every quote")]
        ) from None


def _take(word: str, words: list[str], variables: dict[str, str], depth: int) -> None:
    """Sort one shell word into flags and variables; a quoted list of flags is opened."""
    match = _ASSIGNMENT.fullmatch(word)
    if match is not None:
        name, value = match.groups()
        if value.startswith("("):
            word = value
        elif not _LONG_FLAG.search(value):
            variables[name] = _filled(value, variables)
            words.append(";")  # an assignment ends the values of the flag before it
            return
        else:
            word = value
    word = _unbracketed(word)
    if depth < 3 and _LONG_FLAG.search(word) and re.search(r"\s", word):
        for inner in _split(_joined(word)):
            _take(inner, words, variables, depth + 1)
        return
    words.append(_filled(word, variables))


def _unbracketed(word: str) -> str:
    """Take off the brackets of an array, which are the ones without a partner in the word."""
    spare = word.count("(") - word.count(")")
    if word == "()":
        return ""
    if spare > 0 and word.startswith("("):
        return word[1:]
    return word[:-1] if spare < 0 and word.endswith(")") else word


def _filled(word: str, variables: dict[str, str]) -> str:
    """Put the values of known variables in their places; `${X:-1}` falls back to 1."""

    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[3], match[2]
        return variables.get(name, match[0] if default is None else default.strip("\"'"))

    for _ in range(4):
        filled = _VARIABLE.sub(value, word)
        if filled == word or len(filled) > 10_000:
            break
        word = filled
    return _ARITHMETIC.sub(lambda match: str(int(match[1]) * int(match[2])), word)


def _flags(words: Sequence[str]) -> dict[str, list[str]]:
    flags: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in words:
        if _LONG_FLAG.match(word):
            name, equals, value = word.partition("=")
            values = [value] if equals else []
            flags[name] = values
        elif word in _ENDS or (word.startswith("${") and "[" in word):
            values = None
        elif values is not None and word:
            values.append(word)
    return flags
