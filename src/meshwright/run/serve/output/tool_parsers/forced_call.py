"""Parsers for `tool_choice` outputs: arguments of a named tool, or a required list of calls."""

import re
from collections.abc import Sequence

import msgspec

from meshwright.run.serve.output.output_delta import OutputDelta


class NamedToolParser:
    """Reads an answer that is nothing but the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str) -> Sequence[OutputDelta]:
        """Return a further stretch of the arguments."""
        name = "" if self._begun else self._name
        self._begun = True
        return [OutputDelta(tool_index=0, name=name, arguments=text)]

    def flush(self) -> Sequence[OutputDelta]:
        """Return nothing: nothing is held back."""
        return ()


CALL_PREFIX = re.compile(
    r'\s*[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*'
)

CALL_SUFFIX = re.compile(r"\s*\}")


class RequiredToolParser:
    """Reads an answer that is a JSON list of `{"name": …, "arguments": {…}}`."""

    def __init__(self) -> None:
        self._held = ""
        self._call = -1
        self._inside = False
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def feed(self, text: str) -> Sequence[OutputDelta]:
        """Return names and arguments as far as they are known."""
        self._held += text
        heard: list[OutputDelta] = []
        while self._held:
            if self._inside and not self._depth and self._held[0].isspace():
                self._held = self._held.lstrip()
            elif self._inside:
                cut = self._end_of_arguments()
                heard.append(OutputDelta(tool_index=self._call, arguments=self._held[:cut]))
                self._held = self._held[cut:]
            elif found := CALL_PREFIX.match(self._held):
                self._call += 1
                self._inside = True
                self._held = self._held[found.end() :]
                heard.append(OutputDelta(tool_index=self._call, name=msgspec.json.decode(found[1])))
            elif found := CALL_SUFFIX.match(self._held):
                self._held = self._held[found.end() :]
            else:
                break
        return heard

    def _end_of_arguments(self) -> int:
        """Return how much of what is held belongs to the arguments."""
        for at, character in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._inside = False
                    return at + 1
        return len(self._held)

    def flush(self) -> Sequence[OutputDelta]:
        """Return nothing: what is held is the end of the list, or a call that broke off."""
        return ()
