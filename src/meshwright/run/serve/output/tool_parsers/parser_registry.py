"""Tool calls out of text as it streams, in the ways that models write them.

    parser = create_tool_parser("hermes")
    for text in pieces:
        for delta in parser.feed(text): ...
    parser.flush()

However the text is cut into pieces, the same content, names and arguments come out. Arguments are
the model's own text, but for those in XML, which become JSON. What looks like a call and is none is
content; of text with calls, only the white space around calls is dropped. A call that breaks off
keeps the arguments it had.

Mistral's `[TOOL_CALLS]` and Llama's `<|python_tag|>` are special tokens: the text has to be decoded
with them (`base.TOOL_CALL_MARKERS` names them).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.errors import InputError, Problem
from meshwright.run.serve.output.output_delta import OutputParser
from meshwright.run.serve.output.tool_parsers.hermes import HermesToolParser
from meshwright.run.serve.output.tool_parsers.llama import LlamaToolParser
from meshwright.run.serve.output.tool_parsers.mistral import MistralToolParser
from meshwright.run.serve.output.tool_parsers.pythonic import PythonicToolParser
from meshwright.run.serve.output.tool_parsers.qwen3_coder import Qwen3CoderToolParser


def create_tool_parser(
    written: str,
    names: Sequence[str] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> OutputParser:
    """Return a reader of calls as a model writes them.

    `names` are those of the tools there are, `parameters` the schemas of their arguments.
    """
    known = None if names is None else frozenset(names)
    readers: dict[str, Callable[[], OutputParser]] = {
        "hermes": HermesToolParser,
        "llama3_json": lambda: LlamaToolParser(known),
        "mistral": MistralToolParser,
        "pythonic": lambda: PythonicToolParser(known),
        "qwen3_coder": lambda: Qwen3CoderToolParser(known, parameters),
    }
    if written not in readers:
        what = f"{written!r} is no way to write calls"
        raise InputError([Problem("tool_call_parser", what, f"use one of {', '.join(readers)}")])
    return readers[written]()
