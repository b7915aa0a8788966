"""`ChatTemplate`: messages to the text a model was trained to read them as.

Templates are programs in Jinja that come with the weights. They run in Jinja's sandbox, which shows
them the messages and nothing of this process, with the few names that templates of published models
expect: `raise_exception`, `strftime_now`, `tojson`, loop controls, and the tag `generation`, which
marks what the model itself would write: `render_with_spans` tells where that is.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from itertools import count
from typing import Any, NamedTuple

from meshwright.errors import InputError, MissingDependency, Problem

TemplateMessage = Mapping[str, Any]
_BEGINS, _ENDS = "_generation_begins", "_generation_ends"
"""What the tag `generation` writes around its text: nothing, but where somebody asks."""


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
        self._failures, self._template, marks = _compile(source)
        self.has_generation_marks = marks
        """Whether it says what the model itself writes."""

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
        given = {**self.special_tokens, **more}
        try:
            text: str = self._template(
                messages=[dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
                documents=given.pop("documents", None),
                add_generation_prompt=add_generation_prompt,
                **given,
            )
        except self._failures as error:
            what = f"the model's chat template refuses them: {error}"
            raise InputError(
                [Problem("messages", what, "follow what the model expects")]
            ) from error
        return text

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


def _compile(source: str) -> tuple[tuple[type[Exception], ...], Callable[..., str], bool]:
    """Return what a template may raise, what renders it, and whether it marks what models write."""
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        hint = "pip install 'meshwright[serve]'"
        raise MissingDependency(
            "chat templates need jinja2, which is not installed", hint
        ) from error

    marks: list[int] = []

    class Generation(Extension):
        """Reads `{% generation %}` … `{% endgeneration %}` as what stands between."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            line = next(parser.stream).lineno
            marks.append(line)
            inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)

            def written(name: str) -> nodes.Node:
                return nodes.Output([nodes.Name(name, "load")], lineno=line)

            return [written(_BEGINS), *inside, written(_ENDS)]

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = _now
    environment.globals[_BEGINS] = environment.globals[_ENDS] = ""
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        what = f"is no Jinja template: {error}"
        raise InputError([Problem("chat_template", what, "mend it, or use another one")]) from error
    faults = (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError)
    return (*faults, TypeError, ValueError), template.render, bool(marks)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as it is: Jinja's own filter escapes what has a meaning in HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(pattern: str) -> str:
    """Return the local date, as templates that tell the model of it expect."""
    return datetime.now().astimezone().strftime(pattern)
