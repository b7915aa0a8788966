"""Tools of a chat: which may be called, which must be, and how a demanded call is read.

Where a call is demanded, a grammar makes the model write plain JSON, which is read here. Where the
model may choose, it writes calls in its own way, which `output.tool_parsers` reads.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from meshwright.run.serve.sampling_params import StructuredOutputsParams
from meshwright.run.serve.server.api_errors import invalid_request
from meshwright.run.serve.server.protocol.request_conversion import build_json_schema_params
from meshwright.run.serve.server.protocol.request_schema import (
    ChatCompletionRequest,
    FunctionDefinition,
    NamedToolChoice,
    ToolParam,
)

MAX_TOOLS = 1024
MAX_TOOLS_BYTES = 2**21
"""Tools of one request, and the bytes of their JSON: half a million tokens of most prompts."""


class ToolChoice(NamedTuple):
    """What a request says of tools."""

    template_tools: list[dict[str, Any]] | None
    """What the template is given."""
    structured_outputs: StructuredOutputsParams | None
    """What the answer must look like, where a call is demanded."""
    mode: Literal["none", "auto", "listed", "named"]
    """Whether calls are read, and how they are written."""
    function_names: tuple[str, ...] = ()
    """The functions that may be called."""
    parameter_schemas: Mapping[str, Any] = {}
    """Schemas of their arguments."""


def resolve_tool_choice(body: ChatCompletionRequest) -> ToolChoice:
    """Return what a chat asks of tools."""
    choice = body.tool_choice
    if not body.tools:
        if choice not in (None, "none", "auto"):
            raise invalid_request(
                "`tool_choice` demands a tool, but `tools` is empty", "tool_choice"
            )
        return ToolChoice(None, None, "none")
    check_tools(body.tools)
    functions = [tool.function for tool in body.tools]
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        raise invalid_request("`tools` has two functions of the same name", "tools")
    if choice == "none":
        return ToolChoice(None, None, "none")
    shown = [to_template_tool(function) for function in functions]
    if isinstance(choice, NamedToolChoice):
        name = choice.function.name
        if name not in names:
            raise invalid_request(
                f"`tool_choice` names {name!r}, which is not one of `tools`: "
                + ", ".join(names[:20]),
                "tool_choice.function.name",
            )
        parameters = functions[names.index(name)].parameters
        grammar = (
            build_json_schema_params(parameters)
            if parameters
            else StructuredOutputsParams(kind="json_object")
        )
        return ToolChoice(shown, grammar, "named", (name,))
    if choice == "required":
        several = body.parallel_tool_calls is not False
        return ToolChoice(
            shown,
            build_json_schema_params(build_tool_call_schema(functions, several=several)),
            "listed",
        )
    schemas = {function.name: function.parameters for function in functions}
    return ToolChoice(shown, None, "auto", tuple(names), schemas)


def check_tools(tools: Sequence[ToolParam]) -> None:
    """Raise where a request has more tools than a model can be told of."""
    if len(tools) > MAX_TOOLS:
        raise invalid_request(f"`tools` has {len(tools)} tools; give at most {MAX_TOOLS}", "tools")
    size = len(msgspec.json.encode(tools))
    if size > MAX_TOOLS_BYTES:
        raise invalid_request(
            f"`tools` has {size:,} bytes of JSON; give at most {MAX_TOOLS_BYTES:,}", "tools"
        )


def build_tool_call_schema(
    functions: Sequence[FunctionDefinition], *, several: bool
) -> dict[str, Any]:
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


def to_template_tool(function: FunctionDefinition) -> dict[str, Any]:
    """Return a function as chat templates read it."""
    plain: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        plain["description"] = function.description
    plain["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": plain}
