"""`Calls`: what all readers of tool calls share, and the marks that models put around calls."""

from typing import Literal

from meshwright.run.serve.sampling.heard import Heard, Seams
from meshwright.run.serve.sampling.json_call import JsonCall

ToolFormat = Literal["hermes", "llama3_json", "mistral", "pythonic", "qwen3_coder"]
MARKS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
}


class Calls:
    """What all readers share: held text, content, the call being read, and the count of calls."""

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self._names = names
        """The only names there are, for formats that do not mark calls."""
        self._held = ""
        self._content = Seams()
        self._call: JsonCall | None = None
        self._count = 0
        self._told = False
        self._empty = True

    def _begin(self) -> None:
        self._call, self._told, self._empty = JsonCall(), False, True

    def _read(self, call: JsonCall, *, marked: bool) -> list[Heard]:
        """Let a call take what is held, and return what can be told of it."""
        self._held = call.take(self._held)
        sure = call.begun or (marked and call.done)
        if call.name is None or not sure or not self._known(call.name):
            return []
        heard = []
        if not self._told:
            self._content.cut()
            heard.append(Heard(call=self._count, name=call.name))
            self._count += 1
            self._told = True
        arguments = call.arguments()
        self._empty = self._empty and not arguments
        if call.done and self._empty:
            arguments = "{}"
        if arguments:
            heard.append(Heard(call=self._count - 1, arguments=arguments))
        return heard

    def _say(self, text: str) -> list[Heard]:
        said = self._content.add(text)
        return [Heard(content=said)] if said else []

    def _last(self) -> list[Heard]:
        said = self._content.end()
        return [Heard(content=said)] if said else []

    def _known(self, name: str) -> bool:
        return self._names is None or name in self._names

    def _whole_call(self, name: str, arguments: str) -> list[Heard]:
        self._content.cut()
        self._count += 1
        at = self._count - 1
        return [Heard(call=at, name=name), Heard(call=at, arguments=arguments)]
