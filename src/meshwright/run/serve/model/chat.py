"""`ChatTemplate`: messages to the text a model was trained to read them as.

Templates are programs in Jinja that come with the weights. They run in Jinja's sandbox, which shows
them the messages and nothing of this process, with the few names that templates of published models
expect: `raise_exception`, `strftime_now`, `tojson`, loop controls, and the tag `generation`, which
only marks text for training.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from meshwright.errors import InputError, MissingPart, Problem

Message = Mapping[str, Any]


class ChatTemplate:
    """One template, compiled."""

    def __init__(self, source: str, special: Mapping[str, str] | None = None) -> None:
        """Compile a template; `special` names the tokens it may write, such as `bos_token`."""
        self.source, self.special = source, dict(special or {})
        self._failures, self._template = _compile(source)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> str:
        """Return the text of a conversation, ending where the answer begins.

        Raises `InputError` where the template refuses the messages.
        """
        given = {**self.special, **more}
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


def _compile(source: str) -> tuple[tuple[type[Exception], ...], Callable[..., str]]:
    """Return what a template may raise, and what renders it."""
    try:
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        hint = "pip install 'meshwright[serve]'"
        raise MissingPart("chat templates need jinja2, which is not installed", hint) from error

    class Generation(Extension):
        """Reads `{% generation %}` … `{% endgeneration %}` as what stands between."""

        tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = _now
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        what = f"is no Jinja template: {error}"
        raise InputError([Problem("chat_template", what, "mend it, or use another one")]) from error
    faults = (jinja2.TemplateError, ArithmeticError, LookupError, RecursionError)
    return (*faults, TypeError, ValueError), template.render


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
