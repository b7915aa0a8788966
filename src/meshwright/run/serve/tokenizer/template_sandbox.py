"""`TemplateProgram`: one chat template compiled in Jinja's sandbox, with a bound on its time.

The sandbox shows a template the values it is given and nothing of this process. Beyond that, each
turn of a loop and each call of a macro looks at the clock, nothing is computed while a template is
compiled, and products that only make something huge are refused. What a single filter makes is not
bounded here: a server that renders templates of strangers bounds the process's memory.
"""

import json
import threading
from collections.abc import Iterable
from datetime import datetime
from time import monotonic
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

RENDER_TIMEOUT_S = 10.0
"""The longest a template may render; published ones take less than a millisecond."""
MAX_REPEATED_ITEMS = 10_000_000
"""Characters or items that a multiplication may make."""
MAX_INTEGER_BITS = 100_000
_TICK = "tick"


class TemplateProgram:
    """One template, compiled."""

    def __init__(self, source: str, generation_marks: tuple[str, str]) -> None:
        """Compile a template; the values of `generation_marks` stand around `generation` blocks."""
        environment = _TemplateEnvironment(generation_marks)
        self._environment = environment
        self._template = environment.from_string(source)
        self.has_generation_marks = environment.has_generation_marks

    def render(self, **values: Any) -> str:
        """Return the text; raises whatever the template raises."""
        self._environment.start_clock()
        text: str = self._template.render(**values)
        return text


class _TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox that chat templates run in."""

    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, generation_marks: tuple[str, str]) -> None:
        # Without the optimizer: constants are not computed while a template is compiled.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
        )
        self._clock = threading.local()
        self.generation_marks = generation_marks
        self.has_generation_marks = False
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _format_now

    def start_clock(self) -> None:
        """Begin to count the time of a rendering, in this thread."""
        self._clock.until_s = monotonic() + RENDER_TIMEOUT_S

    @property
    def tick(self) -> None:
        """Raise where the rendering has taken too long; compiled templates read it in loops."""
        if monotonic() > self._clock.until_s:
            raise jinja2.TemplateRuntimeError(f"it takes longer than {RENDER_TIMEOUT_S:g} s")

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse products and powers whose only use is their size."""
        del context
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and hasattr(value, "__len__"):
                    _check_size(len(value) * times, MAX_REPEATED_ITEMS, "items")
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits * max(right, 1) if operator == "**" else bits + right.bit_length()
            _check_size(bits, MAX_INTEGER_BITS, "bits")
        return self.binop_table[operator](left, right)

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        """Let every turn of a loop and every call of a macro look at the clock."""
        found: Iterable[nodes.Node] = source.find_all((nodes.For, nodes.Macro, nodes.CallBlock))
        for node in found:
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
            look = nodes.ExprStmt(nodes.EnvironmentAttribute(_TICK), lineno=node.lineno)
            node.body.insert(0, look)
        return super()._generate(source, name, filename, defer_init)


class _GenerationTag(Extension):
    """Reads `{% generation %}` … `{% endgeneration %}` as the text between."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        environment = self.environment
        assert isinstance(environment, _TemplateEnvironment)
        environment.has_generation_marks = True
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            nodes.Output([nodes.Name(name, "load")], lineno=line)
            for name in environment.generation_marks
        )
        return [begin, *inside, end]


def _check_size(size: int, most: int, unit: str) -> None:
    if size > most:
        raise jinja2.TemplateRuntimeError(f"it makes {size:,} {unit}, more than {most:,}")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


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


def _format_now(pattern: str) -> str:
    """Return the local date, as templates that tell the model of it expect."""
    return datetime.now().astimezone().strftime(pattern)
