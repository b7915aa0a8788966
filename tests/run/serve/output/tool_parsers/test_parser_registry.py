"""Calls and thoughts come out of text whole, however it is cut, and nothing of it is lost."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("torch", reason="the package of sampling works on torch tensors")

from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.run.serve.output.output_delta import OutputParser
from meshwright.run.serve.output.reasoning_parser import ReasoningParser
from meshwright.run.serve.output.tool_parsers.parser_registry import create_tool_parser

Said = tuple[str, str, list[tuple[str, str]]]
"""Content, thoughts, calls with their arguments."""


def said(reader: OutputParser, pieces: Sequence[str]) -> Said:
    content = reasoning = ""
    calls: list[tuple[str, str]] = []
    heard = [each for piece in pieces for each in reader.feed(piece)]
    for each in [*heard, *reader.flush()]:
        content += each.content
        reasoning += each.reasoning
        if each.tool_index is not None:
            if each.name:
                assert each.tool_index == len(calls)
                calls.append((each.name, ""))
            # Stretches of a call follow each other.
            assert each.tool_index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + each.arguments)
    return content, reasoning, calls


def in_any_pieces(make: Callable[[], OutputParser], text: str) -> Said:
    """Read a text whole, letter by letter, and cut at every place: always the same comes out."""
    whole = said(make(), [text])
    assert said(make(), list(text)) == whole
    for cut in range(len(text) + 1):
        assert said(make(), [text[:cut], text[cut:]]) == whole, cut
    return whole


ROME = '{"city": "Rome", "days": [1, 2], "note": "a \\"}]</tool_call> [TOOL_CALLS] \\\\"}'

HERMES: list[tuple[str, Said]] = [
    ("No call, only <tool or < text.\n", ("No call, only <tool or < text.\n", "", [])),
    (
        f'Let me see.\n<tool_call>\n{{"name": "look", "arguments": {ROME}}}\n</tool_call>',
        ("Let me see.", "", [("look", ROME)]),
    ),
    (
        '<tool_call>{"arguments": {"a": 1}, "name": "late"}</tool_call>\n'
        '<tool_call>{"name": "none"}</tool_call> Done. ',
        ("Done. ", "", [("late", '{"a": 1}'), ("none", "{}")]),
    ),
    (
        '<tool_call>{"name": "text", "arguments": "{\\"a\\": \\"é\\"}"}</tool_call>',
        ("", "", [("text", '{"a": "é"}')]),
    ),
    (
        '<tool_call>{"id": 7, "name": "n", "arguments": null, "x": true}</tool_call>',
        ("", "", [("n", "{}")]),
    ),
    # The end is missing: what came is kept.
    (
        '<tool_call>{"name": "cut", "arguments": {"a": "b',
        ("", "", [("cut", '{"a": "b')]),
    ),
    (
        '<tool_call>{"name": "one", "arguments": {}}<tool_call>{"name": "two", "arguments": {}}',
        ("", "", [("one", "{}"), ("two", "{}")]),
    ),
    # No calls: all of the text is content.
    ("<tool_call>not JSON</tool_call>!", ("<tool_call>not JSON</tool_call>!", "", [])),
    ('a <tool_call>{"name": "cu', ('a <tool_call>{"name": "cu', "", [])),
    ('<tool_call>{"a": 1}</tool_call>', ('<tool_call>{"a": 1}</tool_call>', "", [])),
    # The model's own mistake is passed on.
    (
        '<tool_call>{"name": "bad", "arguments": {"a": 1]}}</tool_call> ok',
        ("ok", "", [("bad", '{"a": 1]}}')]),
    ),
]


@pytest.mark.parametrize(("text", "wanted"), HERMES)
def test_hermes(text: str, wanted: Said) -> None:
    assert in_any_pieces(lambda: create_tool_parser("hermes"), text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            f'{{"name": "look", "parameters": {ROME}}}',
            ("", "", [("look", ROME)]),
        ),
        (
            '<|python_tag|>{"type": "function", "name": "look", "parameters": {}}; '
            '{"name": "wait", "parameters": {"s": 1}}\n',
            ("", "", [("look", "{}"), ("wait", '{"s": 1}')]),
        ),
        ('{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', "", [])),
        (
            '{"name": "other", "parameters": {}} and so on',
            ('{"name": "other", "parameters": {}} and so on', "", []),
        ),
        (" {not JSON} ", (" {not JSON} ", "", [])),
        (
            'As {"name": "look", "parameters": {}}',
            ('As {"name": "look", "parameters": {}}', "", []),
        ),
        ("<|python", ("<|python", "", [])),
    ],
)
def test_llama(text: str, wanted: Said) -> None:
    def make() -> OutputParser:
        return create_tool_parser("llama3_json", ["look", "wait"])

    got = in_any_pieces(make, text)
    # White space before what may be a call is not content.
    assert (got[0].strip(), *got[1:]) == (wanted[0].strip(), *wanted[1:])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            f'Sure. [TOOL_CALLS] [{{"name": "look", "arguments": {ROME}}}, '
            '{"name": "wait", "arguments": {}}] after',
            ("Sure. after", "", [("look", ROME), ("wait", "{}")]),
        ),
        (
            f'[TOOL_CALLS]look[ARGS]{ROME}[TOOL_CALLS]wait[CALL_ID]123[ARGS]{{"s": {{}}}}',
            ("", "", [("look", ROME), ("wait", '{"s": {}}')]),
        ),
        ('[TOOL_CALLS]look{"a": "}"} x', ("x", "", [("look", '{"a": "}"}')])),
        ('[TOOL_CALLS]look[ARGS]{"a": ', ("", "", [("look", '{"a": ')])),
        ("only [TOOL text", ("only [TOOL text", "", [])),
        ("[TOOL_CALLS]no brace", ("[TOOL_CALLS]no brace", "", [])),
        ("[TOOL_CALLS][1, 2]", ("[TOOL_CALLS][1, 2]", "", [])),
    ],
)
def test_mistral(text: str, wanted: Said) -> None:
    assert in_any_pieces(lambda: create_tool_parser("mistral"), text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (
            '[look(city="Rome", days=[1, -2], deep={"a": None}), mod.wait(on=true)]',
            (
                "",
                "",
                [
                    ("look", '{"city": "Rome", "days": [1, -2], "deep": {"a": null}}'),
                    ("mod.wait", '{"on": true}'),
                ],
            ),
        ),
        ("<|python_start|>[wait()]<|python_end|>", ("", "", [("wait", "{}")])),
        ("[a link](to=1) and more", ("[a link](to=1) and more", "", [])),
        ('[look(city="Ro', ('[look(city="Ro', "", [])),
        ('[look("Rome")]', ('[look("Rome")]', "", [])),
        ("[look(x=1e999)]", ("[look(x=1e999)]", "", [])),
        ("[look(x=open('f'))]", ("[look(x=open('f'))]", "", [])),
        ("", ("", "", [])),
    ],
)
def test_pythonic(text: str, wanted: Said) -> None:
    assert in_any_pieces(lambda: create_tool_parser("pythonic"), text) == wanted


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(InputError, match="hermes"):
        create_tool_parser("morse")


def test_arguments_stream_as_they_come() -> None:
    reader = create_tool_parser("hermes")
    reader.feed('<tool_call>{"name": "look", "arguments": {"city": "')
    assert [each.arguments for each in reader.feed("Ro")] == ["Ro"]


values: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.text("abc_", min_size=1), st.dictionaries(st.text(), values, max_size=3)),
        min_size=1,
    ),
    st.sampled_from(["hermes", "mistral", "llama3_json"]),
    st.booleans(),
    st.lists(st.integers(1, 9), max_size=80),
)
def test_arguments_of_any_kind_come_out_as_they_were_written(
    calls: list[tuple[str, dict[str, Any]]], way: str, ascii_only: bool, widths: list[int]
) -> None:
    arguments = [json.dumps(values, ensure_ascii=ascii_only) for _, values in calls]
    objects = [
        f'{{"name": {json.dumps(name)}, "arguments": {text}}}'
        for (name, _), text in zip(calls, arguments, strict=True)
    ]
    if way == "hermes":
        text = "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    elif way == "mistral":
        text = f"[TOOL_CALLS][{', '.join(objects)}]"
    else:
        text = "; ".join(objects)
    pieces, at = [], 0
    for width in [*widths, len(text)]:
        pieces.append(text[at : at + width])
        at += width
    content, _, got = said(create_tool_parser(way), pieces)
    assert got == [(name, text) for (name, _), text in zip(calls, arguments, strict=True)]
    assert not content


@pytest.mark.parametrize(
    ("text", "begun", "wanted"),
    [
        ("<think>\nWell, <b\n</think>\n\nYes. ", False, ("Yes. ", "Well, <b", [])),
        ("Well\n</think>\n\nYes.", True, ("Yes.", "Well", [])),
        ("<think>Well</think>", True, ("", "Well", [])),
        ("No thought </think> here", False, ("No thought </think> here", "", [])),
        ("<think>cut off </thi", False, ("", "cut off </thi", [])),
        (" <thin", False, (" <thin", "", [])),
        (
            '<think>a<tool_call></think> b <tool_call>{"name": "n", "arguments": {}}</tool_call>',
            False,
            ("b", "a<tool_call>", [("n", "{}")]),
        ),
        ("", True, ("", "", [])),
    ],
)
def test_thoughts(text: str, begun: bool, wanted: Said) -> None:
    got = in_any_pieces(lambda: ReasoningParser(create_tool_parser("hermes"), begun=begun), text)
    assert got == wanted
    assert said(ReasoningParser(begun=begun), list(text))[1] == wanted[1]


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<tool_", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL"),
    *("<|python_tag|>", "<think>", "</think>", "<|python", '{"name": "f", "arguments": {}}'),
    *('{"name": ', '"f"', '"arguments": ', '{"a": 1}', ", ", "}", "{", "]", "[", '"', "\\", ":"),
    *("<function=f>", "<parameter=a>", "</parameter>", "</function>", "<function="),
    *("f(x=1)", "[f()", " ", "\n", ";", "word", "null", "1.5", "é"),
]


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.sampled_from(["hermes", "mistral", "llama3_json", "pythonic", "qwen3_coder"]),
    st.booleans(),
)
def test_any_text_gives_the_same_in_any_pieces(text: str, way: str, thinks: bool) -> None:
    def make() -> OutputParser:
        reader = create_tool_parser(way, ["f"])
        return ReasoningParser(reader) if thinks else reader

    whole = said(make(), [text])
    assert said(make(), list(text)) == whole
    assert said(make(), [text[:3], text[3:9], text[9:]]) == whole
    if not whole[2] and not thinks:
        assert letters(whole[0]) == letters(text)


def letters(text: str) -> str:
    """Return a text without what lies between calls."""
    return re.sub(r"\s|[;,]|\[TOOL_CALLS\]|<\|python_tag\|>", "", text)
