"""`PythonicToolParser`: parses tool calls written as a list of Python calls."""

import ast
import json
import re
from collections.abc import Sequence

from meshwright.run.serve.output.output_delta import OutputDelta
from meshwright.run.serve.output.tool_parsers.tool_parser import TOOL_CALL_MARKERS, ToolParser

# Longer texts are no list of calls; parsing them would only take time.
_PYTHON_MOST = 100_000


class PythonicToolParser(ToolParser):
    """An answer that is a list of Python calls, `[look(city="Rome"), wait()]`; told at its end."""

    _plain = False
    _BEGINS = re.compile(r"\[\s*(?:[A-Za-z_][\w.]*\s*(?:\(.*)?)?", re.DOTALL)

    def feed(self, text: str) -> Sequence[OutputDelta]:
        """Return content; a list of calls is held back until its end."""
        self._held += text
        if not self._plain:
            rest = self._bare()
            maybe = any(mark.startswith(rest) for mark in TOOL_CALL_MARKERS["pythonic"])
            if maybe or self._BEGINS.fullmatch(rest):
                return []
            self._plain = True
        text, self._held = self._held, ""
        return self._say(text)

    def flush(self) -> Sequence[OutputDelta]:
        """Return the calls, or the text where it is none."""
        heard: list[OutputDelta] = []
        if not self._plain:
            calls = parse_python_calls(self._bare().strip())
            if all(self._known(name) for name, _ in calls):
                for name, arguments in calls:
                    heard += self._whole_call(name, arguments)
            if heard:
                return heard
        return [*self._say(self._held), *self._last()]

    def _bare(self) -> str:
        start, end = TOOL_CALL_MARKERS["pythonic"]
        return self._held.lstrip().removeprefix(start).lstrip().removesuffix(end)


def parse_python_calls(text: str) -> list[tuple[str, str]]:
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
