"""Tool calls in the XML of Qwen3-Coder.

    <tool_call>
    <function=look>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>

Values are plain text between two line ends, so what they are is told by the function's schema:
texts are passed on as they come, other values when they are whole.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from meshwright.run.serve.output.output_delta import OutputDelta
from meshwright.run.serve.output.text_markers import count_partial_marker, find_first_marker
from meshwright.run.serve.output.tool_parsers.argument_types import (
    STRING_TYPE,
    coerce_argument,
    get_schema_types,
)
from meshwright.run.serve.output.tool_parsers.tool_parser import TOOL_CALL_MARKERS, ToolParser

_OPEN, _CLOSE = TOOL_CALL_MARKERS["qwen3_coder"]
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_FUNCTION_END, _PARAMETER_END = "</function>", "</parameter>"
_VALUE_ENDS = (
    _PARAMETER_END, f"\n{_PARAMETER_END}", f"\n{_PARAMETER}", f"\n{_FUNCTION_END}", _CLOSE,
    f"\n{_CLOSE}",
)  # fmt: skip
"""What ends a value; models forget its own end now and then."""
_LONGEST_NAME = 256


class Qwen3CoderToolParser(ToolParser):
    """`<tool_call><function=…><parameter=…>` among content."""

    _part: Literal["content", "opened", "name", "inside", "key", "value", "after"] = "content"
    _lead = ""
    """What came since the call may have begun: content, where no call comes of it."""
    _function = _key = ""
    _keys = 0
    _kinds: frozenset[str] = STRING_TYPE
    _value = ""
    """What came of a value that is told when it is whole."""
    _streams = _fresh = _marked = False

    def __init__(
        self, names: frozenset[str] | None = None, parameters: Mapping[str, Any] | None = None
    ) -> None:
        """Read calls; `parameters` are the schemas of the functions' arguments, by name."""
        super().__init__(names)
        self._parameters = parameters or {}

    def feed(self, text: str) -> Sequence[OutputDelta]:
        """Return what can be told of a further stretch of text."""
        self._held += text
        heard: list[OutputDelta] = []
        parts: dict[str, Callable[[list[OutputDelta]], bool]] = {
            "content": self._outside,
            "opened": self._opened,
            "name": self._named,
            "inside": self._inside,
            "key": self._keyed,
            "value": self._valued,
            "after": self._after,
        }
        while self._held and parts[self._part](heard):
            pass
        return heard

    def flush(self) -> Sequence[OutputDelta]:
        """Return what was held back."""
        heard: list[OutputDelta] = []
        if self._part == "value" and self._streams:
            heard += self._argue(_escaped(self._held))
        elif self._part != "value":
            heard += self._say(self._lead + self._held)
        return [*heard, *self._last()]

    def _outside(self, heard: list[OutputDelta]) -> bool:
        # Where the tools are known, a call needs no mark to be told from content.
        marks = (_OPEN,) if self._names is None else (_OPEN, _FUNCTION)
        found = find_first_marker(self._held, marks)
        cut = found.start if found else len(self._held) - count_partial_marker(self._held, marks)
        heard += self._say(self._held[:cut])
        self._held = self._held[found.end if found else cut :]
        if found:
            self._lead, self._marked = found.text, found.text == _OPEN
            self._part = "opened" if self._marked else "name"
        return found is not None

    def _opened(self, heard: list[OutputDelta]) -> bool:
        """Look for the function of a call."""
        self._take_space()
        if self._held.startswith(_FUNCTION):
            self._lead += _FUNCTION
            self._held = self._held[len(_FUNCTION) :]
            self._part = "name"
            return True
        return not _FUNCTION.startswith(self._held) and self._no_call(heard)

    def _named(self, heard: list[OutputDelta]) -> bool:
        name, ended, rest = self._held.partition(">")
        if not ended and len(name) <= _LONGEST_NAME and "\n" not in name:
            return False
        name = name.strip()
        named = bool(ended and name) and "\n" not in name and len(name) <= _LONGEST_NAME
        if not named or not (self._marked or self._known(name)):
            return self._no_call(heard)
        self._held, self._part, self._lead = rest, "inside", ""
        self._function, self._keys = name, 0
        self._content.mark_boundary()
        self._count += 1
        heard.append(OutputDelta(tool_index=self._count - 1, name=name))
        return True

    def _no_call(self, heard: list[OutputDelta]) -> bool:
        heard += self._say(self._lead)
        self._part, self._lead = "content", ""
        return True

    def _inside(self, heard: list[OutputDelta]) -> bool:
        """Look for the next argument of a call, or for its end."""
        found = find_first_marker(self._held, (_PARAMETER, _FUNCTION_END, _CLOSE))
        if found is None:
            return False
        if stray := self._held[: found.start].strip():
            heard += self._say(stray)
        self._held = self._held[found.end :]
        if found.text == _PARAMETER:
            self._part, self._lead = "key", _PARAMETER
            return True
        heard += self._argue("}" if self._keys else "{}")
        self._part = "after" if found.text == _FUNCTION_END else "content"
        return True

    def _keyed(self, heard: list[OutputDelta]) -> bool:
        key, ended, rest = self._held.partition(">")
        if not ended:
            return False
        self._key, self._held, self._lead = key.strip(), rest, ""
        self._kinds = self._kinds_of(self._key)
        self._streams, self._fresh, self._value = self._kinds == STRING_TYPE, True, ""
        self._part = "value"
        comma = ", " if self._keys else "{"
        self._keys += 1
        head = f"{comma}{json.dumps(self._key, ensure_ascii=False)}: "
        heard += self._argue(head + ('"' if self._streams else ""))
        return True

    def _kinds_of(self, key: str) -> frozenset[str]:
        """Return what an argument may be: a text, where its function has none of this name."""
        whole = self._parameters.get(self._function)
        properties = whole.get("properties") if isinstance(whole, Mapping) else None
        if not isinstance(properties, Mapping) or key not in properties:
            return STRING_TYPE
        return get_schema_types(properties[key], whole)

    def _valued(self, heard: list[OutputDelta]) -> bool:
        if self._fresh:
            # The line end behind the key is no part of the value.
            self._held, self._fresh = self._held.removeprefix("\n"), False
            if not self._held:
                return False
        found = find_first_marker(self._held, _VALUE_ENDS)
        cut = (
            found.start
            if found
            else len(self._held) - count_partial_marker(self._held, _VALUE_ENDS)
        )
        if self._streams:
            heard += self._argue(_escaped(self._held[:cut]))
        else:
            self._value += self._held[:cut]
        self._held = self._held[cut:]
        if found is None:
            return False
        heard += self._argue('"' if self._streams else coerce_argument(self._value, self._kinds))
        if found.text.endswith(_PARAMETER_END):
            self._held = self._held[len(found.text) :]
        self._part = "inside"
        return True

    def _after(self, _: list[OutputDelta]) -> bool:
        """Pass over the end of a call; some models write several functions before it."""
        self._held = self._held.lstrip()
        if self._held.startswith(_CLOSE):
            self._held, self._part = self._held[len(_CLOSE) :], "content"
        elif self._held.startswith(_FUNCTION):
            self._held, self._part = self._held[len(_FUNCTION) :], "name"
            self._lead, self._marked = _FUNCTION, True
        elif any(mark.startswith(self._held) for mark in (_CLOSE, _FUNCTION)):
            return False
        else:
            self._part = "content"
        return True

    def _take_space(self) -> None:
        rest = self._held.lstrip()
        self._lead += self._held[: len(self._held) - len(rest)]
        self._held = rest

    def _argue(self, text: str) -> list[OutputDelta]:
        return [OutputDelta(tool_index=self._count - 1, arguments=text)] if text else []


def _escaped(text: str) -> str:
    """Return text as it stands inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
