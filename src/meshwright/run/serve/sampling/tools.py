"""Tool calls out of text as it streams, in the ways that models write them.

    reader = tool_reader("hermes")
    for text in pieces:
        for heard in reader.feed(text): ...
    reader.end()

However the text is cut into pieces, the same content, names and arguments come out. Arguments are
the model's own text. What looks like a call and is none is content; of text with calls, only the
white space around calls is dropped. A call that breaks off keeps the arguments it had.

Mistral's `[TOOL_CALLS]` and Llama's `<|python_tag|>` are special tokens: the text has to be decoded
with them (`calls.MARKS` names them).
"""

from collections.abc import Callable, Sequence

from meshwright.errors import InputError, Problem
from meshwright.run.serve.sampling.bare_calls import LlamaCalls, PythonicCalls
from meshwright.run.serve.sampling.heard import Reader
from meshwright.run.serve.sampling.marked_calls import HermesCalls, MistralCalls


def tool_reader(written: str, names: Sequence[str] | None = None) -> Reader:
    """Return a reader of calls as a model writes them; `names` are those of the tools there are."""
    known = None if names is None else frozenset(names)
    readers: dict[str, Callable[[], Reader]] = {
        "hermes": HermesCalls,
        "llama3_json": lambda: LlamaCalls(known),
        "mistral": MistralCalls,
        "pythonic": lambda: PythonicCalls(known),
    }
    if written not in readers:
        what = f"{written!r} is no way to write calls"
        raise InputError([Problem("tool format", what, f"use one of {', '.join(readers)}")])
    return readers[written]()
