"""Hostile chat templates: they are refused when they are read, or end with an error in time."""

import time

import pytest

pytest.importorskip("jinja2", reason="renders templates")

from meshwright.errors import InputError
from meshwright.run.serve.tokenizer import template_sandbox
from meshwright.run.serve.tokenizer.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
CALLS = (
    "{% macro one(n) %}{% if n %}{{ one(n - 1) }}{{ one(n - 1) }}{% endif %}{% endmacro %}"
    "{{ one(60) }}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(2) %}" * 30 + "{% endfor %}" * 30,
        "{{" + "(" * 3000 + "1" + ")" * 3000 + "}}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "{{ " + "not " * 5000 + "1 }}",
        "{{ 1" + " + 1" * 20_000 + " }}",
        "{% for %}",
        "{{ 'a' ",
        "{% generation %}",
        "x" * (MAX_TEMPLATE_CHARS + 1),
    ],
    ids=["loops", "parentheses", "ifs", "nots", "sum", "for", "open", "generation", "long"],
)
def test_a_template_that_cannot_be_compiled_is_an_error_of_its_file(source: str) -> None:
    with pytest.raises(InputError, match="chat_template"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10**10 }}",
        "{{ 10**10 * 'a' }}",
        "{{ [0] * 10**10 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{% set ns = namespace(n=7) %}{% for a in range(99) %}{% set ns.n = ns.n * ns.n %}"
        "{% endfor %}",
        "{{ range(10**9) | list }}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ 1 // 0 }}",
        "{{ messages[7].content }}",
        "{{ messages.missing() }}",
        "{{ 'a' | center(10**13) }}",
        "{{ '%99999999999999d' % 1 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include 'other' %}",
        "{{ 'a' | nothing }}",
    ],
)
def test_a_template_that_fails_says_so_as_an_error_of_the_messages(source: str) -> None:
    with pytest.raises(InputError):
        ChatTemplate(source).render(MESSAGES)


@pytest.mark.parametrize("source", [LOOPS, CALLS], ids=["loops", "macros"])
def test_a_template_that_does_not_end_is_ended(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_sandbox, "RENDER_TIMEOUT_S", 0.05)
    template = ChatTemplate(source)
    for _ in range(2):
        begun = time.monotonic()
        with pytest.raises(InputError, match="takes longer"):
            template.render(MESSAGES)
        assert time.monotonic() - begun < 30


def test_a_template_of_constants_is_not_computed_when_it_is_read() -> None:
    assert ChatTemplate("{% if tools %}{{ 'a' * 10**10 }}{% endif %}ok").render(MESSAGES) == "ok"


def test_products_of_usual_sizes_are_computed() -> None:
    source = "{{ '=' * 3 }}{{ 2 * 3.5 }}{{ 2 ** 10 }}{{ [1] * 2 }}{{ 3 * 'ab' }}"
    assert ChatTemplate(source).render(MESSAGES) == "===7.01024[1, 1]ababab"


def test_a_template_names_the_roles_that_it_writes_itself() -> None:
    template = ChatTemplate("{% if m.role == 'ipython' or m.role == \"observation\" %}{% endif %}")
    assert template.names_role("ipython")
    assert template.names_role("observation")
    assert not template.names_role("bogus")
    assert not template.names_role("role")
