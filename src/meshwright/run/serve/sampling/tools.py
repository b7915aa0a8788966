"""Tool calls out of text as it streams, in the ways that models write them.

    reader = tool_reader("hermes")
    for text in pieces:
        for heard in reader.feed(text): ...
    reader.end()

However the text is cut into pieces, the same content, names and arguments come out. Arguments are
the model's own text, but for those in XML, which become JSON. What looks like a call and is none is
content; of text with calls, only the white space around calls is dropped. A call that breaks off
keeps the arguments it had.

Mistral's `[TOOL_CALLS]` and Llama's `<|python_tag|>` are special tokens: the text has to be decoded
with them (`calls.MARKS` names them).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright.errors import InputError, Problem
from meshwright.run.serve.sampling.bare_calls import LlamaCalls, PythonicCalls
from meshwright.run.serve.sampling.heard import Reader
from meshwright.run.serve.sampling.marked_calls import HermesCalls, MistralCalls
from meshwright.run.serve.sampling.xml_calls import XmlCalls


def tool_reader(
    written: str,
    names: Sequence[str] | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> Reader:
    """Return a reader of calls as a model writes them.

    `names` are those of the tools there are, `parameters` the schemas of their arguments.
    """
    known = None if names is None else frozenset(names)
    readers: dict[str, Callable[[], Reader]] = {
        "hermes": HermesCalls,
        "llama3_json": lambda: LlamaCalls(known),
        "mistral": MistralCalls,
        "pythonic": lambda: PythonicCalls(known),
        "qwen3_coder": lambda: XmlCalls(known, parameters),
    }
    if written not in readers:
        what = f"{written!r} is no way to write calls"
        raise InputError([Problem("tool format", what, f"use one of {', '.join(readers)}")])
    return readers[written]()
