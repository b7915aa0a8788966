"""Bodies say what is wanted; events become pieces with their tokens, however they are cut."""

import msgspec
import pytest

from meshwright.observe.bench.serving.openai_protocol import RequestOptions, StreamParser


def _stream(*events: object) -> bytes:
    lines = b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events)
    return lines + b"data: [DONE]\n\n"


def _text(text: str, **more: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "text": text} | more]}


def test_a_body_asks_for_an_exact_length_and_running_counts() -> None:
    body = msgspec.json.decode(RequestOptions(model="m").body([1, 2], 7, 0))
    assert body["prompt"] == [1, 2]
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (7, 7, True)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "seed" not in body


def test_a_plain_body_has_only_openais_fields() -> None:
    asking = RequestOptions(
        model="m", api="chat", openai_only=True, temperature=0.5, return_token_ids=True
    )
    body = msgspec.json.decode(asking.body("hello", 7, 3))
    assert set(body) == {
        "model", "messages", "max_tokens", "temperature", "stream", "stream_options", "seed",
    }  # fmt: skip
    assert body["stream_options"] == {"include_usage": True}


def test_extra_fields_win() -> None:
    body = msgspec.json.decode(
        RequestOptions(model="m", extra={"top_k": 3, "max_tokens": 1}).body([1], 7, 0)
    )
    assert (body["top_k"], body["max_tokens"]) == (3, 1)


def test_events_are_the_same_however_the_connection_cuts_them() -> None:
    stream = _stream(_text("a"), _text("ü"), _text("c", finish_reason="stop"))
    whole, bitwise = StreamParser(), StreamParser()
    whole.feed(stream, 1.0)
    for at in range(len(stream)):
        bitwise.feed(stream[at : at + 1], 1.0)
    for answer in (whole, bitwise):
        assert answer.content == "aüc"
        assert (answer.finish_reason, answer.is_complete, answer.tokens) == ("stop", True, 3)
    assert whole.answer_hash == bitwise.answer_hash


def test_a_piece_has_as_many_tokens_as_the_running_count_grew() -> None:
    answer = StreamParser()
    for at, (text, count) in enumerate([("", 0), ("ab", 2), ("", 3), ("c", 4)]):
        answer.feed(_stream(_text(text) | {"usage": {"completion_tokens": count}}), float(at))
    assert answer.token_counts == [2, 1, 1]  # also the token that is no whole character yet
    assert answer.times_s == [1.0, 2.0, 3.0]


def test_a_count_at_the_end_alone_does_not_become_the_tokens_of_the_last_piece() -> None:
    answer = StreamParser()
    last = _text("b", finish_reason="length") | {"usage": {"completion_tokens": 9}}
    answer.feed(_stream(_text("a"), last), 1.0)
    assert answer.token_counts == [1, 1]
    assert answer.tokens == 9


def test_tokens_are_kept_where_the_server_gives_them() -> None:
    answer = StreamParser()
    answer.feed(_stream(_text("ab", token_ids=[5, 6]), _text("", token_ids=[7])), 1.0)
    assert answer.content == (5, 6, 7)
    assert answer.token_counts == [2, 1]


def test_a_chats_role_is_no_token_and_its_reasoning_is() -> None:
    answer = StreamParser()
    deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "yes"}]
    answer.feed(_stream(*({"choices": [{"delta": delta}]} for delta in deltas)), 1.0)
    assert answer.token_counts == [1, 1]
    assert answer.content == "hmyes"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'data: {"error": {"message": "it died"}}\n\n', "it died"),
        (b'data: {"error": "it died"}\n\n', "it died"),
        (b"data: {broken\n\n", "cannot be read"),
    ],
)
def test_errors_in_a_stream_are_kept(line: bytes, said: str) -> None:
    answer = StreamParser()
    answer.feed(line, 1.0)
    assert said in answer.error


def test_the_servers_counts_are_kept() -> None:
    answer = StreamParser()
    usage = {
        "prompt_tokens": 12,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 8},
    }
    answer.feed(_stream(_text("a"), {"choices": [], "usage": usage}), 1.0)
    assert (answer.prompt_tokens, answer.tokens, answer.cached_tokens) == (12, 1, 8)
    assert answer.token_counts == [1]
