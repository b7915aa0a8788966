"""Templates tell which parts of a conversation the model would have written."""

import pytest

pytest.importorskip("jinja2", reason="renders templates")

from meshwright.errors import InputError
from meshwright.run.serve.tokenizer.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b\ue0000\ue001"}]
SAID = "{% for m in messages %}{% if m.role == 'assistant' %}<{% generation %}{{ m.content }}!{% "
PLAIN = SAID + "endgeneration %}>{% else %}{{ m.content }}{% endif %}{% endfor %}"


def test_marked_text_is_found_and_nothing_is_added_to_the_text() -> None:
    template = ChatTemplate(PLAIN)
    found = template.render_with_spans(MESSAGES)
    assert found.text == template.render(MESSAGES) == "a< b\ue0000\ue001!>"
    assert [found.text[a:b] for a, b in found.spans] == [" b\ue0000\ue001!"]
    assert template.has_generation_marks
    assert not ChatTemplate("{{ messages[0].content }}").has_generation_marks


def test_marks_in_macros_and_within_marks_count_once() -> None:
    source = (
        "{% macro say(x) %}{% generation %}({% generation %}{{ x }}{% endgeneration %})"
        "{% endgeneration %}{% endmacro %}{% for m in messages %}{{ say(m.role) }}{% endfor %}"
    )
    found = ChatTemplate(source).render_with_spans(MESSAGES)
    assert [found.text[a:b] for a, b in found.spans] == ["(user)", "(assistant)"]


def test_marks_whose_text_is_changed_afterwards_are_refused() -> None:
    source = "{% set x %}{% generation %} b {% endgeneration %}{% endset %}{{ x | trim }}"
    assert ChatTemplate(source).render(MESSAGES) == "b"
    with pytest.raises(InputError, match="generation marks"):
        ChatTemplate(source).render_with_spans(MESSAGES)
