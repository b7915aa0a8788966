"""Tool calls that marks set apart from content, as Hermes, Qwen and Mistral write them."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Literal

from meshwright.run.serve.sampling.calls import MARKS, Calls
from meshwright.run.serve.sampling.heard import Heard
from meshwright.run.serve.sampling.json_call import JsonCall
from meshwright.run.serve.sampling.markers import first_found, unfinished


class HermesCalls(Calls):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>` among content, as Hermes and Qwen do."""

    _START, _END = MARKS["hermes"]
    _spilled = _closing = False

    def feed(self, text: str) -> Sequence[Heard]:
        """Return what can be told of a further stretch of text."""
        self._held += text
        heard: list[Heard] = []
        while self._held:
            if self._call is not None and not self._spilled:
                if not self._inside(self._call, heard):
                    break
                continue
            found = first_found(self._held, (self._START, self._END))
            cut = found.start if found else len(self._held) - self._open_end()
            heard += self._outside(self._held[:cut])
            if found is None:
                self._held = self._held[cut:]
                break
            self._held = self._held[found.end :]
            if found.text == self._START:
                self._begin()
                self._spilled = self._closing = False
            elif self._call is not None or self._closing:
                self._call, self._spilled, self._closing = None, False, False
            else:
                heard += self._say(self._END)
        return heard

    def end(self) -> Sequence[Heard]:
        """Return what was held back."""
        heard: list[Heard] = []
        if self._call is not None and not self._spilled and not self._told:
            heard += self._say(self._START + self._call.raw)
        heard += self._outside(self._held)
        return heard + self._last()

    def _open_end(self) -> int:
        return unfinished(self._held, (self._START, self._END))

    def _inside(self, call: JsonCall, heard: list[Heard]) -> bool:
        """Read on in a call; say whether it ended."""
        heard += self._read(call, marked=True)
        if call.done and self._told:
            self._call, self._closing = None, True
        elif call.broken and self._told:
            self._spilled = True
        elif call.done or call.broken:
            heard += self._say(self._START + call.raw)
            self._call = None
        return call.done or call.broken

    def _outside(self, text: str) -> list[Heard]:
        if self._spilled and text:
            # The arguments are wrong, but they are the model's: nothing of them is dropped.
            return [Heard(call=self._count - 1, arguments=text)]
        return self._say(text)


class MistralCalls(Calls):
    """`[TOOL_CALLS]` with a list of calls after it, or with `name[ARGS]{…}` as newer models do."""

    _START = MARKS["mistral"][0]
    _part: Literal["content", "start", "list", "name"] = "content"
    _lead = ""
    """What came before a call, from the mark on: content, where no call comes of it."""
    _prefix = ""
    """What was put before a call's own text to make an object of it."""

    def feed(self, text: str) -> Sequence[Heard]:
        """Return what can be told of a further stretch of text."""
        self._held += text
        heard: list[Heard] = []
        parts: dict[str, Callable[[list[Heard]], bool]] = {
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

    def end(self) -> Sequence[Heard]:
        """Return what was held back."""
        raw = "" if self._call is None or self._told else self._call.raw
        return [*self._say(self._lead + raw + self._held), *self._last()]

    def _outside(self, heard: list[Heard]) -> bool:
        found = first_found(self._held, (self._START,))
        cut = found.start if found else len(self._held) - unfinished(self._held, (self._START,))
        heard += self._say(self._held[:cut])
        self._held = self._held[found.end if found else cut :]
        if found:
            self._part, self._lead = "start", self._START
        return found is not None

    def _started(self, _: list[Heard]) -> bool:
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

    def _listed(self, heard: list[Heard]) -> bool:
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

    def _named(self, _: list[Heard]) -> bool:
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
            self._call.take(prefix)

    def _inside(self, call: JsonCall, heard: list[Heard]) -> bool:
        """Read on in a call; say whether it ended."""
        if self._prefix:
            heard += self._read_arguments(call)
        else:
            heard += self._read(call, marked=True)
        if self._told:
            self._lead = ""
        if not (call.done or call.broken):
            return False
        if not self._told:
            heard += self._say(self._lead + call.raw)
            self._lead = ""
        if call.broken or not self._told:
            self._part = "content"
        self._call = None
        return True

    def _read_arguments(self, call: JsonCall) -> list[Heard]:
        """Let a call take its arguments alone, which end with their last brace."""
        text, rest = self._held, ""
        for at, letter in enumerate(text):
            call.take(letter)
            if call.broken or call.whole:
                rest = text[at + (not call.broken) :]
                call.take("}")
                break
        self._held = ""
        heard = self._read(call, marked=True)
        self._held = rest
        return heard
