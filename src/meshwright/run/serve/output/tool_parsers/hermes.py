"""Tool calls that marks set apart from content, as Hermes, Qwen and Mistral write them."""

from collections.abc import Sequence

from meshwright.run.serve.output.output_delta import OutputDelta
from meshwright.run.serve.output.text_markers import count_partial_marker, find_first_marker
from meshwright.run.serve.output.tool_parsers.json_call import JsonCallParser
from meshwright.run.serve.output.tool_parsers.tool_parser import TOOL_CALL_MARKERS, ToolParser


class HermesToolParser(ToolParser):
    """`<tool_call>{"name": …, "arguments": …}</tool_call>` among content, as Hermes and Qwen do."""

    _START, _END = TOOL_CALL_MARKERS["hermes"]
    _spilled = _closing = False

    def feed(self, text: str) -> Sequence[OutputDelta]:
        """Return what can be told of a further stretch of text."""
        self._held += text
        heard: list[OutputDelta] = []
        while self._held:
            if self._call is not None and not self._spilled:
                if not self._inside(self._call, heard):
                    break
                continue
            found = find_first_marker(self._held, (self._START, self._END))
            cut = found.start if found else len(self._held) - self._open_end()
            heard += self._outside(self._held[:cut])
            if found is None:
                self._held = self._held[cut:]
                break
            self._held = self._held[found.end :]
            if found.text == self._START:
                self._begin()
                self._spilled = self._closing = False
            elif self._call is not None or self._closing:
                self._call, self._spilled, self._closing = None, False, False
            else:
                heard += self._say(self._END)
        return heard

    def flush(self) -> Sequence[OutputDelta]:
        """Return what was held back."""
        heard: list[OutputDelta] = []
        if self._call is not None and not self._spilled and not self._told:
            heard += self._say(self._START + self._call.raw_text)
        heard += self._outside(self._held)
        return heard + self._last()

    def _open_end(self) -> int:
        return count_partial_marker(self._held, (self._START, self._END))

    def _inside(self, call: JsonCallParser, heard: list[OutputDelta]) -> bool:
        """Read on in a call; say whether it ended."""
        heard += self._read(call, marked=True)
        if call.is_done and self._told:
            self._call, self._closing = None, True
        elif call.is_malformed and self._told:
            self._spilled = True
        elif call.is_done or call.is_malformed:
            heard += self._say(self._START + call.raw_text)
            self._call = None
        return call.is_done or call.is_malformed

    def _outside(self, text: str) -> list[OutputDelta]:
        if self._spilled and text:
            # The arguments are wrong, but they are the model's: nothing of them is dropped.
            return [OutputDelta(tool_index=self._count - 1, arguments=text)]
        return self._say(text)
