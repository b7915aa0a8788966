"""Which reader tells apart what the choices of a chat say: content, thoughts, tool calls."""

import re
from collections.abc import Callable

from meshwright.errors import InputError
from meshwright.run.serve.output.output_delta import OutputParser
from meshwright.run.serve.output.reasoning_parser import ReasoningParser
from meshwright.run.serve.output.tool_parsers.forced_call import NamedToolParser, RequiredToolParser
from meshwright.run.serve.output.tool_parsers.parser_registry import create_tool_parser
from meshwright.run.serve.output.tool_parsers.tool_parser import TOOL_CALL_MARKERS, ToolParserName
from meshwright.run.serve.server.api_errors import invalid_request
from meshwright.run.serve.server.protocol.tool_choice import ToolChoice
from meshwright.run.serve.tokenizer.tokenizer_like import TokenizerLike

THINK_START = "<think>"
# What templates tell a model about the way to write calls; the first that is found counts.
TEMPLATE_PATTERNS: list[tuple[str, ToolParserName | None]] = [
    (r"<function=[^>]*>\s*<parameter=", "qwen3_coder"),
    (r"<function=", None),  # other calls in XML, which nobody reads here
    (r"<tool_call>", "hermes"),
    (r"\[AVAILABLE_TOOLS\]|\[TOOL_CALLS\]", "mistral"),
    (r"\[func_name1\(", "pythonic"),
    (r'\{"name": function name, "parameters":', "llama3_json"),
]
PROBE_TOOL = {
    "type": "function",
    "function": {"name": "probe", "description": "", "parameters": {}},
}


def detect_tool_call_parser(tokenizer: TokenizerLike) -> ToolParserName | None:
    """Return how a model writes calls, by what its template tells it; None where unknown."""
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": ""}], [PROBE_TOOL], add_generation_prompt=True
        )
    except InputError:
        return None
    return next((found for trace, found in TEMPLATE_PATTERNS if re.search(trace, text)), None)


class OutputParserFactory:
    """Makes the readers of a model's answers."""

    def __init__(self, tokenizer: TokenizerLike, told: str | None, *, reasoning: bool) -> None:
        """Find out how the model writes calls, unless it is told.

        Raises `InputError` where what is told is no way to write calls.
        """
        if told is not None:
            create_tool_parser(told)
        self._words = tokenizer
        self._format = told or detect_tool_call_parser(tokenizer)
        self._reasoning = reasoning

    def visible_special_tokens(self, tools: ToolChoice) -> tuple[str, ...]:
        """Return the special tokens that the text of an answer has to show."""
        for written, marks in TOOL_CALL_MARKERS.items():
            if tools.mode == "auto" and written == self._format:
                return marks
        return ()

    def parser_builder(
        self, tools: ToolChoice, prompt: tuple[int, ...], *, constrained: bool
    ) -> Callable[[], OutputParser] | None:
        """Return what makes the reader of a choice; None where everything said is content."""
        if tools.mode == "named":
            return lambda: NamedToolParser(tools.function_names[0])
        if tools.mode == "listed":
            return RequiredToolParser
        if constrained:
            return None
        written = self._format
        if tools.mode == "none":
            written = None
        elif written is None:
            raise invalid_request(
                "`tool_choice` is auto, but how this model writes calls is not known: start the"
                " server with `--tool-call-parser`, or demand a call with `required`",
                "tool_choice",
            )
        if self._reasoning:
            begun = self._words.decode(prompt[-8:]).rstrip().endswith(THINK_START)
            return lambda: ReasoningParser(_calls(written, tools), begun=begun)
        return None if written is None else lambda: _reader(written, tools)


def _calls(written: str | None, tools: ToolChoice) -> OutputParser | None:
    return None if written is None else _reader(written, tools)


def _reader(written: str, tools: ToolChoice) -> OutputParser:
    return create_tool_parser(written, tools.function_names, tools.parameter_schemas)
