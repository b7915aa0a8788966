"""Tools of a chat: which may be called, which must be, and how a demanded call is read.

Where a call is demanded, a grammar makes the model write plain JSON, which is read here. Where the
model may choose, it writes calls in its own way, which `sampling.tools` reads.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from meshwright.run.serve.asked import Grammar
from meshwright.run.serve.sampling.heard import Heard
from meshwright.run.serve.server.asking import schema_grammar
from meshwright.run.serve.server.bodies import ChatBody, ChosenTool, Function
from meshwright.run.serve.server.faults import refused


class NamedCall:
    """Reads an answer that is nothing but the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str) -> Sequence[Heard]:
        """Return a further stretch of the arguments."""
        name = "" if self._begun else self._name
        self._begun = True
        return [Heard(call=0, name=name, arguments=text)]

    def end(self) -> Sequence[Heard]:
        """Return nothing: nothing is held back."""
        return ()


HEAD = re.compile(r'\s*[\[,]\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*')
CLOSE = re.compile(r"\s*\}")


class ListedCalls:
    """Reads an answer that is a JSON list of `{"name": …, "arguments": {…}}`."""

    def __init__(self) -> None:
        self._held = ""
        self._call = -1
        self._inside = False
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def feed(self, text: str) -> Sequence[Heard]:
        """Return names and arguments as far as they are known."""
        self._held += text
        heard: list[Heard] = []
        while self._held:
            if self._inside and not self._depth and self._held[0].isspace():
                self._held = self._held.lstrip()
            elif self._inside:
                cut = self._end_of_arguments()
                heard.append(Heard(call=self._call, arguments=self._held[:cut]))
                self._held = self._held[cut:]
            elif found := HEAD.match(self._held):
                self._call += 1
                self._inside = True
                self._held = self._held[found.end() :]
                heard.append(Heard(call=self._call, name=msgspec.json.decode(found[1])))
            elif found := CLOSE.match(self._held):
                self._held = self._held[found.end() :]
            else:
                break
        return heard

    def _end_of_arguments(self) -> int:
        """Return how much of what is held belongs to the arguments."""
        for at, character in enumerate(self._held):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self._inside = False
                    return at + 1
        return len(self._held)

    def end(self) -> Sequence[Heard]:
        """Return nothing: what is held is the end of the list, or a call that broke off."""
        return ()


class Tools(NamedTuple):
    """What a request says of tools."""

    shown: list[dict[str, Any]] | None
    """What the template is given."""
    grammar: Grammar | None
    """What the answer must look like, where a call is demanded."""
    way: Literal["none", "auto", "listed", "named"]
    """Whether calls are read, and how they are written."""
    names: tuple[str, ...] = ()
    """The functions that may be called."""
    parameters: Mapping[str, Any] = {}
    """Schemas of their arguments."""


def tools_of(body: ChatBody) -> Tools:
    """Return what a chat asks of tools."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise refused("`tool_choice` demands a tool, but `tools` is empty", "tool_choice")
        return Tools(None, None, "none")
    functions = [tool.function for tool in body.tools]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise refused("`tools` has two functions of the same name", "tools")
    if choice == "none":
        return Tools(None, None, "none")
    shown = [shown_tool(function) for function in functions]
    if isinstance(choice, ChosenTool):
        name = choice.function.name
        if name not in names:
            raise refused(
                f"`tool_choice` names {name!r}, which is not one of `tools`: {', '.join(names)}",
                "tool_choice.function.name",
            )
        parameters = functions[names.index(name)].parameters
        grammar = schema_grammar(parameters) if parameters else Grammar(kind="json_object")
        return Tools(shown, grammar, "named", (name,))
    if choice == "required":
        several = body.parallel_tool_calls is not False
        return Tools(shown, schema_grammar(calls_schema(functions, several=several)), "listed")
    schemas = {function.name: function.parameters for function in functions}
    return Tools(shown, None, "auto", tuple(names), schemas)


def calls_schema(functions: Sequence[Function], *, several: bool) -> dict[str, Any]:
    """Return the schema of a list of calls of these functions."""
    shared: dict[str, Any] = {}
    kinds = []
    for at, function in enumerate(functions):
        parameters: Mapping[str, Any] = function.parameters or {"type": "object"}
        if "$ref" in str(parameters):
            # References count from the top of a schema, which is no longer theirs.
            shared[f"f{at}"] = _moved(parameters, f"#/$defs/f{at}")
            parameters = {"$ref": f"#/$defs/f{at}"}
        kinds.append(
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [function.name]},
                    "arguments": parameters,
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": kinds}}
    if not several:
        schema["maxItems"] = 1
    if shared:
        schema["$defs"] = shared
    return schema


def _moved(schema: Any, place: str) -> Any:
    if isinstance(schema, Mapping):
        return {
            key: place + value[1:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value, place)
            for key, value in schema.items()
        }
    if isinstance(schema, list):
        return [_moved(value, place) for value in schema]
    return schema


def shown_tool(function: Function) -> dict[str, Any]:
    """Return a function as chat templates read it."""
    plain: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        plain["description"] = function.description
    plain["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": plain}
