"""Which reader tells apart what the choices of a chat say: content, thoughts, tool calls."""

import re
from collections.abc import Callable

from meshwright.errors import InputError
from meshwright.run.serve.sampling.calls import MARKS, ToolFormat
from meshwright.run.serve.sampling.heard import Reader
from meshwright.run.serve.sampling.reasoning import Thoughts
from meshwright.run.serve.sampling.tools import tool_reader
from meshwright.run.serve.server.faults import refused
from meshwright.run.serve.server.tools import ListedCalls, NamedCall, Tools
from meshwright.run.serve.server.words import Words

THINKS = "<think>"
# What templates tell a model about the way to write calls; the first that is found counts.
TRACES: list[tuple[str, ToolFormat | None]] = [
    (r"<function=[^>]*>\s*<parameter=", "qwen3_coder"),
    (r"<function=", None),  # other calls in XML, which nobody reads here
    (r"<tool_call>", "hermes"),
    (r"\[AVAILABLE_TOOLS\]|\[TOOL_CALLS\]", "mistral"),
    (r"\[func_name1\(", "pythonic"),
    (r'\{"name": function name, "parameters":', "llama3_json"),
]
PROBE = {"type": "function", "function": {"name": "probe", "description": "", "parameters": {}}}


def format_of(words: Words) -> ToolFormat | None:
    """Return how a model writes calls, by what its template tells it; None where unknown."""
    try:
        text = words.chat([{"role": "user", "content": ""}], [PROBE], add_generation_prompt=True)
    except InputError:
        return None
    return next((found for trace, found in TRACES if re.search(trace, text)), None)


class Readers:
    """Makes the readers of a model's answers."""

    def __init__(self, words: Words, told: str | None, *, reasoning: bool) -> None:
        """Find out how the model writes calls, unless it is told.

        Raises `InputError` where what is told is no way to write calls.
        """
        if told is not None:
            tool_reader(told)
        self._words = words
        self._format = told or format_of(words)
        self._reasoning = reasoning

    def marks(self, tools: Tools) -> tuple[str, ...]:
        """Return the special tokens that the text of an answer has to show."""
        for written, marks in MARKS.items():
            if tools.way == "auto" and written == self._format:
                return marks
        return ()

    def maker(
        self, tools: Tools, prompt: tuple[int, ...], *, constrained: bool
    ) -> Callable[[], Reader] | None:
        """Return what makes the reader of a choice; None where everything said is content."""
        if tools.way == "named":
            return lambda: NamedCall(tools.names[0])
        if tools.way == "listed":
            return ListedCalls
        if constrained:
            return None
        written = self._format
        if tools.way == "none":
            written = None
        elif written is None:
            raise refused(
                "`tool_choice` is auto, but how this model writes calls is not known: start the"
                " server with `--tool-format`, or demand a call with `required`",
                "tool_choice",
            )
        if self._reasoning:
            begun = self._words.decode(prompt[-8:]).rstrip().endswith(THINKS)
            return lambda: Thoughts(_calls(written, tools), begun=begun)
        return None if written is None else lambda: _reader(written, tools)


def _calls(written: str | None, tools: Tools) -> Reader | None:
    return None if written is None else _reader(written, tools)


def _reader(written: str, tools: Tools) -> Reader:
    return tool_reader(written, tools.names, tools.parameters)
