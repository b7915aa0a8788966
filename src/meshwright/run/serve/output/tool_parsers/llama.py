"""Answers that are tool calls from beginning to end, as Llama writes them: JSON, or Python."""

from collections.abc import Sequence

from meshwright.run.serve.output.output_delta import OutputDelta
from meshwright.run.serve.output.tool_parsers.tool_parser import TOOL_CALL_MARKERS, ToolParser


class LlamaToolParser(ToolParser):
    """An answer that is nothing but `{"name": …, "parameters": …}`, or several with `;` between."""

    _plain = False

    def feed(self, text: str) -> Sequence[OutputDelta]:
        """Return what can be told of a further stretch of text."""
        self._held += text
        heard: list[OutputDelta] = []
        while self._held:
            if self._plain:
                heard += self._say(self._held)
                self._held = ""
            elif self._call is not None:
                heard += self._read(self._call, marked=False)
                if not (self._call.is_done or self._call.is_malformed):
                    break
                self._plain = self._call.is_malformed or not self._told
                if not self._told:
                    heard += self._say(self._call.raw_text)
                self._call = None
            elif not self._at_call():
                break
        return heard

    def flush(self) -> Sequence[OutputDelta]:
        """Return what was held back."""
        raw = "" if self._call is None or self._told else self._call.raw_text
        return [*self._say(raw + self._held), *self._last()]

    def _at_call(self) -> bool:
        """Pass over what comes before a call; say whether it is known what follows."""
        (tag,) = TOOL_CALL_MARKERS["llama3_json"]
        between = " \t\r\n;," if self._count else " \t\r\n"
        rest = self._held.lstrip(between)
        if rest.startswith("{"):
            self._held = rest
            self._begin()
            return True
        if rest.startswith(tag):
            self._held = rest[len(tag) :]
            return True
        if not rest or tag.startswith(rest):
            return False
        self._plain = True
        return True
