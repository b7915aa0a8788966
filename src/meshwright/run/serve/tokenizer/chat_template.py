"""`ChatTemplate`: messages to the text a model was trained to read them as.

Templates are programs in Jinja that come with the weights. They run in the sandbox of
`template_sandbox`, which bounds their time, with the few names that templates of published models
expect: `raise_exception`, `strftime_now`, `tojson`, loop controls, and the tag `generation`, which
marks what the model itself would write: `render_with_spans` tells where that is.

The sandbox does not bound memory. `mw serve` renders in a process whose memory is bounded
(`server.input_processing`).
"""

import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.errors import InputError, MissingDependency, Problem

if TYPE_CHECKING:
    from meshwright.run.serve.tokenizer.template_sandbox import TemplateProgram

TemplateMessage = Mapping[str, Any]
_BEGINS, _ENDS = "_generation_begins", "_generation_ends"
"""Names that the tag `generation` writes around its text: empty unless somebody asks for spans."""
MAX_TEMPLATE_CHARS = 2**20
"""Characters of a template: published ones have at most some 20,000."""


class RenderedChat(NamedTuple):
    """The text of a conversation, and which parts of it the model would have written."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """First character of each part, and the one after its last."""


class ChatTemplate:
    """One template, compiled."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile a template; `special_tokens` are those that it may write, such as `bos_token`."""
        self.source, self.special_tokens = source, dict(special_tokens or {})
        if len(source) > MAX_TEMPLATE_CHARS:
            what = f"has {len(source):,} characters, and {MAX_TEMPLATE_CHARS:,} are read"
            raise InputError([Problem("chat_template", what, "shorten it, or use another one")])
        self._program = _compile(source)
        self.has_generation_marks = self._program.has_generation_marks
        """Whether it says what the model itself writes."""

    def names_role(self, role: str) -> bool:
        """Tell whether the template has something of its own for a role."""
        return f"'{role}'" in self.source or f'"{role}"' in self.source

    def render(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> str:
        """Return the text of a conversation, ending where the answer begins.

        Raises `InputError` where the template refuses the messages.
        """
        given = {_BEGINS: "", _ENDS: "", **self.special_tokens, **more}
        try:
            return self._program.render(
                messages=[dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                documents=given.pop("documents", None),
                add_generation_prompt=add_generation_prompt,
                **given,
            )
        # A template is a program of somebody else's: whatever it raises is its own fault.
        except Exception as error:
            what = f"the model's chat template refuses them: {_reason(error)}"
            raise InputError(
                [Problem("messages", what, "follow what the model expects")]
            ) from error

    def render_with_spans(
        self,
        messages: Sequence[TemplateMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> RenderedChat:
        """Return a whole conversation, with the spans inside `{% generation %}`.

        Raises `InputError` where the template does more to the marked text than to write it.
        """
        given: dict[str, Any] = {**more, "add_generation_prompt": False}
        text = self.render(messages, tools=tools, **given)
        # Characters of private use, with a number that the text does not have behind them.
        free = (f"\ue000{number}\ue001" for number in count())
        begin = next(mark for mark in free if mark not in text)
        end = next(mark for mark in free if mark not in text)
        noted = self.render(messages, tools=tools, **{**given, _BEGINS: begin, _ENDS: end})
        found = _between(re.split(f"({begin}|{end})", noted), begin, end)
        if found.text != text:
            what = "writes its text differently where its generation marks are told apart"
            fix = "write {% generation %} where nothing trims or changes what stands inside"
            raise InputError([Problem("chat_template", what, fix)])
        return found


def _between(parts: Sequence[str], begin: str, end: str) -> RenderedChat:
    """Take marks out of a text; of marks within marks, the outer ones count."""
    text, spans, depth, first = "", [], 0, 0
    for part in parts:
        if part == begin:
            first = first if depth else len(text)
            depth += 1
        elif part == end:
            depth -= 1
            if not depth:
                spans.append((first, len(text)))
        else:
            text += part
    return RenderedChat(text, tuple(spans))


def _compile(source: str) -> "TemplateProgram":
    try:
        from meshwright.run.serve.tokenizer.template_sandbox import TemplateProgram
    except ImportError as error:
        hint = "pip install 'meshwright[serve]'"
        raise MissingDependency(
            "chat templates need jinja2, which is not installed", hint
        ) from error
    try:
        return TemplateProgram(source, generation_marks=(_BEGINS, _ENDS))
    # Jinja refuses what it cannot read, and Python does not compile blocks that nest too deeply.
    except Exception as error:
        what = f"is no Jinja template: {_reason(error)}"
        raise InputError([Problem("chat_template", what, "mend it, or use another one")]) from error


def _reason(error: Exception) -> str:
    """Return why a template failed, in one line."""
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    if isinstance(error, MemoryError):
        return "it needs more memory than it may have"
    return str(error) or type(error).__name__
