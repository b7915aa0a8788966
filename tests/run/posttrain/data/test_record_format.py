"""Records of files are read with their place, and understood by their fields."""

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright.errors import InputError
from meshwright.run.posttrain.data.record_format import ChatExample, TextExample, parse_record
from meshwright.run.posttrain.data.records import DataRecord, read_records
from meshwright.run.serve.server.protocol.request_conversion import convert_chat_messages
from meshwright.run.serve.server.protocol.request_schema import ChatMessageParam

USER = {"role": "user", "content": "hi"}
GOOD = {"role": "assistant", "content": "good"}
BAD = {"role": "assistant", "content": "bad"}


def test_lines_lists_and_parquet_hold_the_same_records(tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [{"messages": [USER, GOOD]}, {"messages": [USER, BAD]}]
    lines = "\n\n".join(map(json.dumps, records))
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines + "\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.json").write_text(json.dumps(records, indent=1))
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "d.parquet")
    found = list(read_records([tmp_path]))
    assert [one.values for one in found] == records * 4
    assert found[1].source == f"{tmp_path}/a.jsonl:3"
    assert found[-1].source == f"{tmp_path}/d.parquet: row 2"


def test_damaged_files_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": []}\n{"mess')
    with pytest.raises(InputError, match=r"a\.jsonl:2: is no JSON object"):
        list(read_records([path]))
    (tmp_path / "b.parquet").write_bytes(b"no")
    with pytest.raises(InputError, match="not a whole Parquet file"):
        list(read_records([tmp_path / "b.parquet"]))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b"{}" * 1000)[:30])
    with pytest.raises(InputError, match="cannot read to its end"):
        list(read_records([tmp_path / "c.jsonl.gz"]))
    with pytest.raises(InputError, match="cannot read"):
        list(read_records([tmp_path / "none.jsonl"]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="folder without records"):
        list(read_records([tmp_path / "empty"]))


def test_a_chat_keeps_its_tools_and_loses_fields_that_are_not_there() -> None:
    tool = {"type": "function"}
    message = {"role": "assistant", "content": None, "tool_calls": None, "name": "x", "weight": 0}
    values = {"messages": [USER, message], "tools": [tool], "chat_template_kwargs": {"a": 1}}
    form = parse_record(DataRecord("here", values))
    cleaned = {"role": "assistant", "content": "", "name": "x"}
    assert form.examples == (ChatExample((USER, cleaned), (tool,), {"a": 1}, 0, frozenset({1})),)
    assert form.kind == "chats"


def test_messages_are_what_a_server_would_read_of_them() -> None:
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"city": "Oslo"}'},
                }
            ],
        },
    ]
    (chat,) = parse_record(DataRecord("", {"messages": sent})).examples
    served = convert_chat_messages(msgspec.convert(sent, list[ChatMessageParam]))
    assert isinstance(chat, ChatExample)
    assert list(chat.messages) == served
    assert chat.messages[0]["content"] == "a\nb"
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}


def test_prompts_and_answers_are_texts_or_messages() -> None:
    assert parse_record(DataRecord("", {"prompt": "a", "completion": "b"})).examples == (
        TextExample("a", "b"),
    )
    chat = ChatExample((USER, GOOD), num_prompt_messages=1)
    for answer in ("good", [GOOD]):
        assert parse_record(DataRecord("", {"prompt": [USER], "completion": answer})).examples == (
            chat,
        )


def test_pairs_share_a_prompt_that_is_given_or_found() -> None:
    both = (
        ChatExample((USER, GOOD), num_prompt_messages=1),
        ChatExample((USER, BAD), num_prompt_messages=1),
    )
    told = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    found = {"chosen": [USER, GOOD], "rejected": [USER, BAD], "prompt": None}
    for values in (told, found):
        form = parse_record(DataRecord("", values))
        assert (form.kind, form.examples) == ("pairs", both)


def test_pairs_may_hold_their_prompt_as_other_data_sets_have_it() -> None:
    sides = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
    wanted = (
        ChatExample((USER, GOOD), num_prompt_messages=1),
        ChatExample((USER, BAD), num_prompt_messages=1),
    )
    assert parse_record(DataRecord("", {"prompt": "hi", **sides})).examples == wanted
    alone = {"chosen": [GOOD], "rejected": [BAD]}
    assert parse_record(DataRecord("", {"prompt": "hi", **alone})).examples == wanted
    texts = {"chosen": "Human: hi Assistant: good", "rejected": "Human: hi Assistant: glad"}
    prompt = "Human: hi Assistant:"
    assert parse_record(DataRecord("", texts)).examples == (
        TextExample(prompt, " good"),
        TextExample(prompt, " glad"),
    )


def test_turns_of_sharegpt_are_messages() -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "good"}]
    assert parse_record(DataRecord("", {"conversations": turns})).examples == (
        ChatExample((USER, GOOD)),
    )
    with pytest.raises(InputError, match="turn 1 of conversations is from none of"):
        parse_record(DataRecord("", {"conversations": [{"from": "nobody", "value": ""}]}))


def test_labels_make_verdicts() -> None:
    for label, liked in ((True, True), (0, False)):
        form = parse_record(DataRecord("", {"prompt": "a", "completion": "b", "label": label}))
        assert (form.kind, form.is_preferred) == ("verdicts", liked)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"text": "x"}, "holds text, which is no chat"),
        ({"messages": "hi"}, "no list of messages"),
        ({"messages": [{"from": "human", "value": "hi"}]}, "message 1 of messages has no role"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "share no prompt"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "do not differ"),
        ({"prompt": "a", "completion": "b", "label": "yes"}, "label 'yes'"),
        ({"messages": [{"role": "user"}, GOOD]}, "message 1 of messages: has no `content`"),
        ({"messages": [USER, GOOD | {"weight": 0.5}]}, "has the weight 0.5"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, GOOD]},
            "only text is taken",
        ),
        (
            {
                "messages": [
                    USER,
                    {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]},
                ]
            },
            "is not JSON",
        ),
        ({"messages": [USER, GOOD | {"tool_calls": 5}]}, "tool_calls is no list"),
        (
            {"messages": [USER, GOOD | {"tool_calls": [{"function": {"arguments": "[1]"}}]}]},
            "arguments is no object",
        ),
        ({"messages": [{"role": "user", "content": [{"type": ["x"]}]}, GOOD]}, "only text"),
    ],
)
def test_what_is_no_chat_is_refused_by_its_place(values: dict[str, Any], fault: str) -> None:
    with pytest.raises(InputError, match=f"here: .*{fault}"):
        parse_record(DataRecord("here", values))
