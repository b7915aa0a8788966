"""Words of a folder: tokens, ends, and conversations written as transformers writes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.run.serve.sampling_params import SamplingParams
from meshwright.run.serve.tokenizer.chat_template import ChatTemplate
from meshwright.run.serve.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.run.nn.huggingface.reference import transformers
from tests.run.serve.model.test_gguf import TEXT, trained

CHATML = """
{%- if tools %}
<|im_start|>system
Tools:
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{%- endif %}
{%- for message in messages %}
    {%- if loop.index > 4 %}{% break %}{% endif %}
    {%- if message.role == "tool" %}{% continue %}{% endif %}
    <|im_start|>{{ message['role'] }}
    {{ message.content | trim }}
    {%- for call in message.tool_calls or [] %}
    {{ call.function.arguments | tojson(indent=2) }}
    {%- endfor %}
    {%- generation %}marked{% endgeneration %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}
"""
DATED = """{{ bos_token }}{% set ns = namespace(found=false) %}
{%- for m in messages if m.role != 'system' -%}
[{{ m.role }}] {{ m.content }}{{ eos_token }}
{%- endfor %} {{ strftime_now("%Y") }} {{ kind | default("plain") }}"""
PICKY = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}ok"
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "  Be <kind> & 'short'. "},
    {"role": "user", "content": "Wie spät? 日本"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "clock", "arguments": {"zone": "ü<", "deep": [1, None]}}}]},
    {"role": "tool", "content": "12"},
    {"role": "user", "content": "left out"},
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"x": "<é>"}}}]


def folder(path: Path, template: str, **config: Any) -> Any:
    """Save a tokenizer with a template; return transformers' own."""
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained(digits=True), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    theirs.chat_template = template or None
    theirs.save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps(config))
    return theirs


@pytest.mark.parametrize("template", [CHATML, DATED])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_conversations_are_written_as_transformers_does(
    template: str, tools: Any, prompt: bool, tmp_path: Path
) -> None:
    theirs = folder(tmp_path, template, eos_token_id=[0, 2])
    words = load_tokenizer(tmp_path)
    given = {"tools": tools, "add_generation_prompt": prompt, "kind": "special"}
    wanted = theirs.apply_chat_template(MESSAGES, tokenize=False, **given)
    assert words.has_chat_template
    assert words.apply_chat_template(MESSAGES, **given) == wanted
    ids = theirs.apply_chat_template(MESSAGES, return_dict=False, **given)
    assert words.encode(words.apply_chat_template(MESSAGES, **given), special=False) == ids


def test_ends_and_special_tokens_are_found(tmp_path: Path) -> None:
    folder(tmp_path, "", eos_token_id=0)
    words = load_tokenizer(tmp_path)
    assert words.eos_token_ids == {0, 2}
    assert words.special_token_ids == {0, 1, 2}
    assert words.token_to_id("<|im_end|>") == 2
    assert words.id_to_token(1) == "<|im_start|>"
    assert words.id_to_token(10**6) is None
    assert words.vocab_size == trained(digits=True).get_vocab_size()
    assert not words.has_chat_template
    with pytest.raises(InputError, match="use /v1/completions"):
        words.apply_chat_template(MESSAGES)


def test_a_model_says_how_its_tokens_are_drawn(tmp_path: Path) -> None:
    folder(tmp_path, "", temperature=0.6, top_k=20, do_sample=True, top_p=None)
    assert load_tokenizer(tmp_path).default_sampling_params == SamplingParams(
        temperature=0.6, top_k=20
    )
    for wrong in ({"top_k": "many"}, {"temperature": -1}):
        (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
        with pytest.raises(InputError, match="how to draw tokens"):
            load_tokenizer(tmp_path)


def test_text_survives_tokens(tmp_path: Path) -> None:
    theirs = folder(tmp_path, CHATML)
    words = load_tokenizer(tmp_path)
    assert words.encode(TEXT) == theirs(TEXT)["input_ids"]
    assert words.decode(words.encode(TEXT)) == TEXT
    ids = words.encode("日")
    assert words.decode(ids[:1]).endswith("�")


def test_older_folders_keep_templates_in_the_config(tmp_path: Path) -> None:
    folder(tmp_path, "")
    path = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    for template in ("yes", named):
        path.write_text(json.dumps({"chat_template": template, "eos_token": {"content": "no"}}))
        assert load_tokenizer(tmp_path).apply_chat_template(MESSAGES) == "yes"


def test_what_a_template_refuses_is_an_input_error() -> None:
    template = ChatTemplate(PICKY)
    assert template.render([{"role": "user", "content": ""}]) == "ok"
    with pytest.raises(InputError, match="user first"):
        template.render(MESSAGES)
    with pytest.raises(InputError, match="refuses them"):
        ChatTemplate("{{ messages[0].content + 1 }}").render(MESSAGES)
    with pytest.raises(InputError, match="no Jinja template"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ range(10000000) | length }}",
    ],
)
def test_templates_cannot_leave_their_sandbox(source: str) -> None:
    with pytest.raises(InputError, match="refuses them"):
        ChatTemplate(source).render(MESSAGES)


def test_folders_without_a_readable_tokenizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="save_pretrained"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match="fetch it again"):
        load_tokenizer(tmp_path)
    folder(tmp_path, "")
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(InputError, match="not a table of fields"):
        load_tokenizer(tmp_path)


def test_words_can_be_made_of_a_tokenizer_alone() -> None:
    words = Tokenizer(trained(digits=True), eos_token_ids=(2,))
    assert words.eos_token_ids == {2}
    assert words.special_tokens == {}
