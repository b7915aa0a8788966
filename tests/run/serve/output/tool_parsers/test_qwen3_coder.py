"""Calls in XML become the JSON that their schemas ask for, however the text is cut."""

import json
from typing import Any

import pytest

pytest.importorskip("torch", reason="the package of sampling works on torch tensors")

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.run.serve.output.output_delta import OutputParser
from meshwright.run.serve.output.tool_parsers.argument_types import (
    coerce_argument,
    get_schema_types,
)
from meshwright.run.serve.output.tool_parsers.parser_registry import create_tool_parser
from tests.run.serve.output.tool_parsers.test_parser_registry import Said, in_any_pieces, said

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "on": {"type": "boolean"},
        "rows": {"type": "array"},
        "deep": {"$ref": "#/$defs/Deep"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "any": {"description": "whatever"},
    },
    "$defs": {"Deep": {"type": "object"}},
}


def reader() -> OutputParser:
    return create_tool_parser("qwen3_coder", ["look", "wait"], {"look": SCHEMA, "wait": None})


def call(*pairs: tuple[str, str], name: str = "look") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("key", "text", "wanted"),
    [
        ("text", "Rome", '"Rome"'),
        ("text", "12", '"12"'),
        ("text", "", '""'),
        ("text", '\n  def f():\n    "é\\"\n', '"\\n  def f():\\n    \\"é\\\\\\"\\n"'),
        ("text", "<b> </param> <tool_call>", '"<b> </param> <tool_call>"'),
        ("count", "12", "12"),
        ("count", "twelve", '"twelve"'),
        ("share", "1", "1"),
        ("share", "NaN", '"NaN"'),
        ("on", "True", "true"),
        ("on", "false", "false"),
        ("rows", '[1, {"a": null}]', '[1, {"a": null}]'),
        ("rows", "[1,", '"[1,"'),
        ("deep", '{"a": "b"}', '{"a": "b"}'),
        ("maybe", "null", "null"),
        ("maybe", "None", "null"),
        ("maybe", "nullify", '"nullify"'),
        ("maybe", "3", '"3"'),
        ("any", "3", "3"),
        ("any", "three", '"three"'),
        ("unknown", "3", '"3"'),
    ],
)
def test_values_are_what_the_schema_says(key: str, text: str, wanted: str) -> None:
    got = in_any_pieces(reader, call((key, text)))
    assert got == ("", "", [("look", f'{{"{key}": {wanted}}}')])
    json.loads(got[2][0][1])


TEXTS: list[tuple[str, Said]] = [
    ("No call, only <tool or <func text.\n", ("No call, only <tool or <func text.\n", "", [])),
    (
        f"Let me see.\n\n{call(('text', 'Rome'), ('count', '2'))}\n{call(name='wait')} Done. ",
        ("Let me see. Done. ", "", [("look", '{"text": "Rome", "count": 2}'), ("wait", "{}")]),
    ),
    # What models leave out, or put in.
    (
        "<tool_call> <function=look>\n<parameter=text> **/a.json   </tool_call> x",
        ("x", "", [("look", '{"text": " **/a.json   "}')]),
    ),
    (
        "<tool_call><function=look>\n<parameter=text>a\n<parameter=count>1\n</function></tool_call>",
        ("", "", [("look", '{"text": "a", "count": 1}')]),
    ),
    (
        "<function=look>\n<parameter=on>\ntrue\n</parameter>\n</function>\n</tool_call>",
        ("", "", [("look", '{"on": true}')]),
    ),
    (
        "<tool_call><function=wait></function><function=look></function></tool_call>",
        ("", "", [("wait", "{}"), ("look", "{}")]),
    ),
    (
        "<tool_call><function=look>so <parameter=count>1</parameter></function></tool_call>",
        ("so", "", [("look", '{"count": 1}')]),
    ),
    # What breaks off keeps what it had.
    (
        "<tool_call><function=look>\n<parameter=text>\nRo\n</par",
        ("", "", [("look", '{"text": "Ro\\n</par')]),
    ),
    ("<tool_call><function=look>\n<parameter=count>\n1", ("", "", [("look", '{"count": ')])),
    # What is no call is content.
    ("<tool_call>\n<function=lo", ("<tool_call>\n<function=lo", "", [])),
    ("<tool_call>{} </tool_call>", ("<tool_call>{} </tool_call>", "", [])),
    ("see <function=other> x", ("see <function=other> x", "", [])),
    ("<tool_call><function=two\nlines></tool_call>",
     ("<tool_call><function=two\nlines></tool_call>", "", [])),
]  # fmt: skip


@pytest.mark.parametrize(("text", "wanted"), TEXTS)
def test_calls_among_content(text: str, wanted: Said) -> None:
    assert in_any_pieces(reader, text) == wanted


def test_texts_stream_as_they_come() -> None:
    one = reader()
    one.feed("<tool_call>\n<function=look>\n<parameter=text>\nA long ")
    assert [each.arguments for each in one.feed('"file"')] == ['\\"file\\"']


@settings(max_examples=40)
@given(
    st.dictionaries(
        st.text("abcxyz_", min_size=1, max_size=6),
        st.text(max_size=20).filter(lambda text: "<" not in text and "\r" not in text),
        max_size=4,
    ),
    st.lists(st.integers(1, 9), max_size=60),
)
def test_any_texts_come_out_as_they_were_written(given_: dict[str, str], widths: list[int]) -> None:
    text, pieces, at = call(*given_.items()), [], 0
    for width in [*widths, len(text)]:
        pieces.append(text[at : at + width])
        at += width
    content, _, ((_, arguments),) = said(reader(), pieces)
    assert not content
    assert json.loads(arguments) == given_


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"enum": ["a", 1, 1.5, None, True, [], {}]},
         {"string", "integer", "number", "null", "boolean", "array", "object"}),
        ({"const": "a"}, {"string"}),
        ({"oneOf": [{"type": "string"}, {}]}, set()),
        ({"$ref": "#/nowhere"}, set()),
        ({"$ref": "#"}, set()),
        (True, set()),
    ],
)  # fmt: skip
def test_kinds_of_schemas(schema: Any, wanted: set[str]) -> None:
    assert get_schema_types(schema) == wanted


def test_numbers_that_json_has_not_are_texts() -> None:
    assert coerce_argument("Infinity", frozenset({"number"})) == '"Infinity"'
