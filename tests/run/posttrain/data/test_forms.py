"""Records of files are read with their place, and understood by their fields."""

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright.errors import InputError
from meshwright.run.posttrain.data.forms import Chat, Text, form_of
from meshwright.run.posttrain.data.records import Record, read_records
from meshwright.run.serve.server.asking import messages_of
from meshwright.run.serve.server.bodies import Message

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
    assert found[1].where == f"{tmp_path}/a.jsonl:3"
    assert found[-1].where == f"{tmp_path}/d.parquet: row 2"


def test_damaged_files_are_named_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": []}\n{"mess')
    with pytest.raises(InputError, match=r"a\.jsonl:2: is no JSON object"):
        list(read_records([path]))
    (tmp_path / "b.parquet").write_bytes(b"no")
    with pytest.raises(InputError, match="not a whole Parquet file"):
        list(read_records([tmp_path / "b.parquet"]))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b"{}" * 1000)[:30])
    with pytest.raises(InputError, match="cannot be read to its end"):
        list(read_records([tmp_path / "c.jsonl.gz"]))
    with pytest.raises(InputError, match="cannot be read"):
        list(read_records([tmp_path / "none.jsonl"]))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="folder without records"):
        list(read_records([tmp_path / "empty"]))


def test_a_chat_keeps_its_tools_and_loses_fields_that_are_not_there() -> None:
    tool = {"type": "function"}
    message = {"role": "assistant", "content": None, "tool_calls": None, "name": "x", "weight": 0}
    values = {"messages": [USER, message], "tools": [tool], "chat_template_kwargs": {"a": 1}}
    form = form_of(Record("here", values))
    cleaned = {"role": "assistant", "content": "", "name": "x"}
    assert form.members == (Chat((USER, cleaned), (tool,), {"a": 1}, 0, frozenset({1})),)
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
    (chat,) = form_of(Record("", {"messages": sent})).members
    served = messages_of(msgspec.convert(sent, list[Message]))
    assert isinstance(chat, Chat)
    assert list(chat.messages) == served
    assert chat.messages[0]["content"] == "a\nb"
    assert chat.messages[1]["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}


def test_prompts_and_answers_are_texts_or_messages() -> None:
    assert form_of(Record("", {"prompt": "a", "completion": "b"})).members == (Text("a", "b"),)
    chat = Chat((USER, GOOD), given=1)
    for answer in ("good", [GOOD]):
        assert form_of(Record("", {"prompt": [USER], "completion": answer})).members == (chat,)


def test_pairs_share_a_prompt_that_is_given_or_found() -> None:
    both = (Chat((USER, GOOD), given=1), Chat((USER, BAD), given=1))
    told = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}
    found = {"chosen": [USER, GOOD], "rejected": [USER, BAD], "prompt": None}
    for values in (told, found):
        form = form_of(Record("", values))
        assert (form.kind, form.members) == ("pairs", both)


def test_pairs_may_hold_their_prompt_as_other_data_sets_have_it() -> None:
    sides = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
    wanted = (Chat((USER, GOOD), given=1), Chat((USER, BAD), given=1))
    assert form_of(Record("", {"prompt": "hi", **sides})).members == wanted
    alone = {"chosen": [GOOD], "rejected": [BAD]}
    assert form_of(Record("", {"prompt": "hi", **alone})).members == wanted
    texts = {"chosen": "Human: hi Assistant: good", "rejected": "Human: hi Assistant: glad"}
    prompt = "Human: hi Assistant:"
    assert form_of(Record("", texts)).members == (Text(prompt, " good"), Text(prompt, " glad"))


def test_turns_of_sharegpt_are_messages() -> None:
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "good"}]
    assert form_of(Record("", {"conversations": turns})).members == (Chat((USER, GOOD)),)
    with pytest.raises(InputError, match="turn 1 of conversations is from none of"):
        form_of(Record("", {"conversations": [{"from": "nobody", "value": ""}]}))


def test_labels_make_verdicts() -> None:
    for label, liked in ((True, True), (0, False)):
        form = form_of(Record("", {"prompt": "a", "completion": "b", "label": label}))
        assert (form.kind, form.liked) == ("verdicts", liked)


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
        form_of(Record("here", values))
