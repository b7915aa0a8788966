"""`MistralToolParser`: parses `[TOOL_CALLS]` followed by a JSON list or `name[ARGS]{…}`."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal

from meshwright.run.serve.output.output_delta import OutputDelta
from meshwright.run.serve.output.text_markers import count_partial_marker, find_first_marker
from meshwright.run.serve.output.tool_parsers.json_call import JsonCallParser
from meshwright.run.serve.output.tool_parsers.tool_parser import TOOL_CALL_MARKERS, ToolParser


class MistralToolParser(ToolParser):
    """`[TOOL_CALLS]` with a list of calls after it, or with `name[ARGS]{…}` as newer models do."""

    _START = TOOL_CALL_MARKERS["mistral"][0]
    _part: Literal["content", "start", "list", "name"] = "content"
    _lead = ""
    """What came before a call, from the mark on: content, where no call comes of it."""
    _prefix = ""
    """What was put before a call's own text to make an object of it."""

    def feed(self, text: str) -> Sequence[OutputDelta]:
        """Return what can be told of a further stretch of text."""
        self._held += text
        heard: list[OutputDelta] = []
        parts: dict[str, Callable[[list[OutputDelta]], bool]] = {
            "content": self._outside,
            "start": self._started,
            "list": self._listed,
            "name": self._named,
        }
        while self._held:
            if self._call is not None:
                moved = self._inside(self._call, heard)
            else:
                moved = parts[self._part](heard)
            if not moved:
                break
        return heard

    def flush(self) -> Sequence[OutputDelta]:
        """Return what was held back."""
        raw = "" if self._call is None or self._told else self._call.raw_text
        return [*self._say(self._lead + raw + self._held), *self._last()]

    def _outside(self, heard: list[OutputDelta]) -> bool:
        found = find_first_marker(self._held, (self._START,))
        cut = (
            found.start
            if found
            else len(self._held) - count_partial_marker(self._held, (self._START,))
        )
        heard += self._say(self._held[:cut])
        self._held = self._held[found.end if found else cut :]
        if found:
            self._part, self._lead = "start", self._START
        return found is not None

    def _started(self, _: list[OutputDelta]) -> bool:
        self._held = self._held.lstrip()
        if not self._held:
            return False
        if self._held[0] == "[":
            self._part, self._lead, self._held = "list", self._lead + "[", self._held[1:]
        elif self._held[0] == "{":
            self._part = "content"
            self._begin_call()
        else:
            self._part = "name"
        return True

    def _listed(self, heard: list[OutputDelta]) -> bool:
        self._held = self._held.lstrip(" \t\r\n,")
        if not self._held:
            return False
        if self._held[0] == "{":
            self._begin_call()
            return True
        if self._held[0] == "]" and not self._lead:
            self._held = self._held[1:]
        self._part = "content"
        heard += self._say(self._lead)
        self._lead = ""
        return True

    def _named(self, _: list[OutputDelta]) -> bool:
        """Read `name[CALL_ID]id[ARGS]{…}` as the object that it stands for."""
        at = self._held.find("{")
        if at < 0:
            return False
        name = re.split(r"\[(?:ARGS|CALL_ID)\]", self._held[:at], maxsplit=1)[0].strip()
        self._begin_call(f'{{"name": {json.dumps(name)}, "arguments": ')
        self._held, self._part = self._held[at:], "content"
        return True

    def _begin_call(self, prefix: str = "") -> None:
        self._begin()
        self._prefix = prefix
        if self._call is not None:
            self._call.feed(prefix)

    def _inside(self, call: JsonCallParser, heard: list[OutputDelta]) -> bool:
        """Read on in a call; say whether it ended."""
        if self._prefix:
            heard += self._read_arguments(call)
        else:
            heard += self._read(call, marked=True)
        if self._told:
            self._lead = ""
        if not (call.is_done or call.is_malformed):
            return False
        if not self._told:
            heard += self._say(self._lead + call.raw_text)
            self._lead = ""
        if call.is_malformed or not self._told:
            self._part = "content"
        self._call = None
        return True

    def _read_arguments(self, call: JsonCallParser) -> list[OutputDelta]:
        """Let a call take its arguments alone, which end with their last brace."""
        text, rest = self._held, ""
        for at, letter in enumerate(text):
            call.feed(letter)
            if call.is_malformed or call.is_complete:
                rest = text[at + (not call.is_malformed) :]
                call.feed("}")
                break
        self._held = ""
        heard = self._read(call, marked=True)
        self._held = rest
        return heard
