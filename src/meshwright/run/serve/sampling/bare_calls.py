"""Answers that are tool calls from beginning to end, as Llama writes them: JSON, or Python."""

import ast
import json
import re
from collections.abc import Sequence

from meshwright.run.serve.sampling.calls import MARKS, Calls
from meshwright.run.serve.sampling.heard import Heard

# Longer texts are no list of calls; parsing them would only take time.
_PYTHON_MOST = 100_000


class LlamaCalls(Calls):
    """An answer that is nothing but `{"name": …, "parameters": …}`, or several with `;` between."""

    _plain = False

    def feed(self, text: str) -> Sequence[Heard]:
        """Return what can be told of a further stretch of text."""
        self._held += text
        heard: list[Heard] = []
        while self._held:
            if self._plain:
                heard += self._say(self._held)
                self._held = ""
            elif self._call is not None:
                heard += self._read(self._call, marked=False)
                if not (self._call.done or self._call.broken):
                    break
                self._plain = self._call.broken or not self._told
                if not self._told:
                    heard += self._say(self._call.raw)
                self._call = None
            elif not self._at_call():
                break
        return heard

    def end(self) -> Sequence[Heard]:
        """Return what was held back."""
        raw = "" if self._call is None or self._told else self._call.raw
        return [*self._say(raw + self._held), *self._last()]

    def _at_call(self) -> bool:
        """Pass over what comes before a call; say whether it is known what follows."""
        (tag,) = MARKS["llama3_json"]
        between = " \t\r\n;," if self._count else " \t\r\n"
        rest = self._held.lstrip(between)
        if rest.startswith("{"):
            self._held = rest
            self._begin()
            return True
        if rest.startswith(tag):
            self._held = rest[len(tag) :]
            return True
        if not rest or tag.startswith(rest):
            return False
        self._plain = True
        return True


class PythonicCalls(Calls):
    """An answer that is a list of Python calls, `[look(city="Rome"), wait()]`; told at its end."""

    _plain = False
    _BEGINS = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*(?:\(.*)?)?", re.DOTALL)

    def feed(self, text: str) -> Sequence[Heard]:
        """Return content; a list of calls is held back until its end."""
        self._held += text
        if not self._plain:
            rest = self._bare()
            maybe = any(mark.startswith(rest) for mark in MARKS["pythonic"])
            if maybe or self._BEGINS.fullmatch(rest):
                return []
            self._plain = True
        text, self._held = self._held, ""
        return self._say(text)

    def end(self) -> Sequence[Heard]:
        """Return the calls, or the text where it is none."""
        heard: list[Heard] = []
        if not self._plain:
            calls = python_calls(self._bare().strip())
            if all(self._known(name) for name, _ in calls):
                for name, arguments in calls:
                    heard += self._whole_call(name, arguments)
            if heard:
                return heard
        return [*self._say(self._held), *self._last()]

    def _bare(self) -> str:
        start, end = MARKS["pythonic"]
        return self._held.lstrip().removeprefix(start).lstrip().removesuffix(end)


def python_calls(text: str) -> list[tuple[str, str]]:
    """Return names and arguments of a list of calls; none where the text is anything else."""
    try:
        if len(text) > _PYTHON_MOST:
            return []
        parsed = ast.parse(text, mode="eval").body
        if not isinstance(parsed, ast.List):
            return []
        return [_python_call(call) for call in parsed.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(call: ast.expr) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("no call by keywords")
    if not isinstance(call.func, ast.Name | ast.Attribute):
        raise ValueError("no name")
    values = {}
    for keyword in call.keywords:
        if keyword.arg is None:
            raise ValueError("no name of an argument")
        values[keyword.arg] = _value(keyword.value)
    return ast.unparse(call.func), json.dumps(values, ensure_ascii=False, allow_nan=False)


def _value(node: ast.expr) -> object:
    # Models mix JSON's words into Python.
    words = {"true": True, "false": False, "null": None}
    if isinstance(node, ast.Name) and node.id in words:
        return words[node.id]
    return ast.literal_eval(node)
