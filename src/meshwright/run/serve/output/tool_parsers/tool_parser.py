"""`ToolParser`: the base of all tool-call parsers, and the marks that models put around calls."""

from typing import Literal

from meshwright.run.serve.output.output_delta import OutputDelta, WhitespaceTrimmer
from meshwright.run.serve.output.tool_parsers.json_call import JsonCallParser

ToolParserName = Literal["hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"]
TOOL_CALL_MARKERS: dict[ToolParserName, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
}


class ToolParser:
    """What all readers share: held text, content, the call being read, and the count of calls."""

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self._names = names
        """The only names there are, for formats that do not mark calls."""
        self._held = ""
        self._content = WhitespaceTrimmer()
        self._call: JsonCallParser | None = None
        self._count = 0
        self._told = False
        self._empty = True

    def _begin(self) -> None:
        self._call, self._told, self._empty = JsonCallParser(), False, True

    def _read(self, call: JsonCallParser, *, marked: bool) -> list[OutputDelta]:
        """Let a call take what is held, and return what can be told of it."""
        self._held = call.feed(self._held)
        sure = call.has_started or (marked and call.is_done)
        if call.name is None or not sure or not self._known(call.name):
            return []
        heard = []
        if not self._told:
            self._content.mark_boundary()
            heard.append(OutputDelta(tool_index=self._count, name=call.name))
            self._count += 1
            self._told = True
        arguments = call.take_arguments()
        self._empty = self._empty and not arguments
        if call.is_done and self._empty:
            arguments = "{}"
        if arguments:
            heard.append(OutputDelta(tool_index=self._count - 1, arguments=arguments))
        return heard

    def _say(self, text: str) -> list[OutputDelta]:
        said = self._content.add(text)
        return [OutputDelta(content=said)] if said else []

    def _last(self) -> list[OutputDelta]:
        said = self._content.flush()
        return [OutputDelta(content=said)] if said else []

    def _known(self, name: str) -> bool:
        return self._names is None or name in self._names

    def _whole_call(self, name: str, arguments: str) -> list[OutputDelta]:
        self._content.mark_boundary()
        self._count += 1
        at = self._count - 1
        return [
            OutputDelta(tool_index=at, name=name),
            OutputDelta(tool_index=at, arguments=arguments),
        ]
