import json
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.run.serve.output.tool_parsers.forced_call import RequiredToolParser
from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import StructuredOutputsParams
from meshwright.run.serve.server import BackgroundServer, ServerConfig, create_app
from meshwright.run.serve.server.protocol.output_parsers import detect_tool_call_parser
from meshwright.run.serve.server.protocol.request_schema import FunctionDefinition
from meshwright.run.serve.server.protocol.tool_choice import build_tool_call_schema
from tests.run.serve.server.pretend import Bytes, PretendEngine
from tests.run.serve.server.wire import events, send

HELLO = [{"role": "user", "content": "hello"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
CALLS = (
    '[{"name": "weather", "arguments": {"town": "Ulm \\"}{[\\u00e9"}},'
    ' {"name":"weather","arguments":{}}]'
)


@pytest.fixture
def says(engine: PretendEngine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the engine say something."""
    return lambda text: monkeypatch.setattr(engine, "says", lambda *_: text)


def test_a_message_is_answered(client: Any) -> None:
    got = client.chat.completions.create(model="parrot", messages=HELLO)
    assert got.choices[0].message.content == ">user: hello"
    assert got.choices[0].message.role == "assistant"
    assert got.choices[0].finish_reason == "stop"
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens


def test_an_answer_streams(client: Any) -> None:
    stream = client.chat.completions.create(
        model="parrot", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    pieces = list(stream)
    assert pieces[0].choices[0].delta.role == "assistant"
    said = [piece.choices[0].delta.content or "" for piece in pieces if piece.choices]
    assert "".join(said) == ">user: hello"
    assert pieces[-2].choices[0].finish_reason == "stop"
    assert pieces[-1].usage.completion_tokens == 13
    assert len({piece.id for piece in pieces}) == 1


def test_every_event_counts_the_tokens_that_were_sent_by_then(served: BackgroundServer) -> None:
    asked = {"messages": HELLO, "stream": True, "n": 2, "max_tokens": 4}
    asked["stream_options"] = {"continuous_usage_stats": True}
    streamed = events(send(served.url, "/v1/chat/completions", asked).body)
    sent = 0
    for piece in streamed:
        texts = [choice["delta"].get("content") for choice in piece["choices"]]
        sent += sum(map(bool, texts))  # a token is a letter here
        assert piece["usage"]["completion_tokens"] == sent, piece
    assert [choice["delta"].get("role") for choice in streamed[0]["choices"]] == ["assistant"]
    assert sent == 8


def test_several_answers_are_told_apart(client: Any) -> None:
    said = ["", "", ""]
    for piece in client.chat.completions.create(model="parrot", messages=HELLO, n=3, stream=True):
        for choice in piece.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == [f"{choice}>user: hello" for choice in range(3)]


def test_parts_of_text_are_joined(client: Any) -> None:
    content = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    got = client.chat.completions.create(
        model="parrot", messages=[{"role": "user", "content": content}]
    )
    assert got.choices[0].message.content == ">b"


def test_likely_tokens_are_told(client: Any) -> None:
    asked: dict[str, Any] = {
        "model": "parrot",
        "messages": HELLO,
        "logprobs": True,
        "top_logprobs": 1,
        "max_tokens": 3,
    }
    whole = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert [one.token for one in whole] == [">", "u", "s"]
    assert whole[1].bytes == [117]
    assert whole[1].top_logprobs[0].token == "u"
    streamed = [
        one
        for piece in client.chat.completions.create(**asked, stream=True)
        if piece.choices[0].logprobs
        for one in piece.choices[0].logprobs.content
    ]
    assert streamed == whole


@pytest.mark.parametrize(
    ("form", "grammar"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutputsParams(kind="json_object")),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}},
            StructuredOutputsParams(kind="json_schema", text='{"type":"integer"}'),
        ),
    ],
)
def test_a_form_reaches_the_engine(
    client: Any, engine: PretendEngine, form: Any, grammar: StructuredOutputsParams | None
) -> None:
    client.chat.completions.create(model="parrot", messages=HELLO, response_format=form)
    assert engine.asked[-1].sampling_params.structured_outputs == grammar


def test_a_named_tool_is_called(client: Any, engine: PretendEngine, says: Any) -> None:
    says('{"town": "Ulm"}')
    asked: dict[str, Any] = {
        "model": "parrot",
        "messages": HELLO,
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
    }
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.message.content is None
    assert choice.message.tool_calls[0].function.name == "weather"
    assert choice.message.tool_calls[0].function.arguments == '{"town": "Ulm"}'
    assert choice.finish_reason == "tool_calls"
    grammar = engine.asked[-1].sampling_params.structured_outputs
    assert grammar is not None
    assert json.loads(grammar.text) == WEATHER["function"]["parameters"]
    assert _streamed_calls(client, asked) == [("weather", '{"town": "Ulm"}')]


def test_a_demanded_tool_is_called_as_often_as_the_model_likes(client: Any, says: Any) -> None:
    says(CALLS)
    asked: dict[str, Any] = {
        "model": "parrot",
        "messages": HELLO,
        "tools": [WEATHER],
        "tool_choice": "required",
    }
    wanted = [("weather", '{"town": "Ulm \\"}{[\\u00e9"}'), ("weather", "{}")]
    message = client.chat.completions.create(**asked).choices[0].message
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    assert calls == wanted
    assert len({call.id for call in message.tool_calls}) == 2
    assert _streamed_calls(client, asked) == wanted


def _streamed_calls(client: Any, asked: dict[str, Any]) -> list[tuple[str, str]]:
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    finish = None
    for piece in client.chat.completions.create(**asked, stream=True):
        choice = piece.choices[0]
        assert not choice.delta.content
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or ():
            if call.function.name:
                assert call.id
                assert call.index not in names
                names[call.index] = call.function.name
            arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
    assert finish == "tool_calls"
    return [(names[at], arguments[at]) for at in sorted(names)]


@pytest.mark.parametrize("cut", range(len(CALLS) + 1))
def test_listed_calls_are_read_wherever_the_text_is_cut(cut: int) -> None:
    reader = RequiredToolParser()
    heard = [*reader.feed(CALLS[:cut]), *reader.feed(CALLS[cut:]), *reader.flush()]
    assert [one.name for one in heard if one.name] == ["weather", "weather"]
    first = "".join(one.arguments for one in heard if one.tool_index == 0)
    assert json.loads(first) == {"town": 'Ulm "}{[é'}
    assert "".join(one.arguments for one in heard if one.tool_index == 1) == "{}"


def test_references_of_tools_stay_their_own() -> None:
    parameters = {"$defs": {"a": {"type": "string"}}, "items": {"$ref": "#/$defs/a"}}
    schema = build_tool_call_schema(
        [FunctionDefinition(name="f", parameters=parameters)], several=False
    )
    assert schema["items"]["anyOf"][0]["properties"]["arguments"] == {"$ref": "#/$defs/f0"}
    assert schema["$defs"]["f0"]["items"] == {"$ref": "#/$defs/f0/$defs/a"}
    assert schema["maxItems"] == 1


def test_earlier_calls_reach_the_template(client: Any, engine: PretendEngine) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    client.chat.completions.create(
        model="parrot",
        messages=[
            *HELLO,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
    )
    ask: Request = engine.asked[-1]
    assert bytes(ask.prompt_token_ids) == b"user: hello\nassistant: \ntool: rain\n"


def test_an_answer_can_be_sent_back_with_all_of_its_fields(
    client: Any, engine: PretendEngine
) -> None:
    got = client.chat.completions.create(model="parrot", messages=HELLO)
    said = got.choices[0].message.model_dump()
    assert said.keys() >= {"annotations", "audio", "function_call", "refusal", "tool_calls"}
    told = {"annotations": [{"type": "url_citation"}], "audio": {"id": "a"}, "reasoning": "hm"}
    refusal = {"role": "assistant", "content": None, "refusal": "no"}
    client.chat.completions.create(
        model="parrot", messages=[*HELLO, said, refusal, {**said, **told}, *HELLO]
    )
    last = engine.asked[-1]
    lines = "user: hello\nassistant: >user: hello\nassistant: no\nassistant: >user: hello\n"
    assert bytes(last.prompt_token_ids).decode() == f"{lines}user: hello\n"


def test_tokens_are_told_where_asked_for(served: BackgroundServer) -> None:
    asked = {"messages": HELLO, "return_token_ids": True, "stream": True, "max_tokens": 2}
    streamed = events(send(served.url, "/v1/chat/completions", asked).body)
    ids = [token for one in streamed for token in one["choices"][0].get("token_ids", ())]
    assert bytes(ids) == b">u"


class Taught(Bytes):
    """A tokenizer whose template tells how calls are written."""

    lesson = "Write calls as <tool_call>{...}</tool_call>\n"

    def apply_chat_template(self, messages: Any, tools: Any = None, **values: Any) -> str:
        text = super().apply_chat_template(messages, tools, **values)
        return self.lesson + text if tools else text


@pytest.mark.parametrize(
    ("lesson", "wanted"),
    [
        (Taught.lesson, "hermes"),
        ("<tool_call><function=f></tool_call>", None),
        ("<tool_call>\n<function=f>\n<parameter=a>\nb\n</parameter>", "qwen3_coder"),
        ("[AVAILABLE_TOOLS][]", "mistral"),
        ('Respond in the format {"name": function name, "parameters": {}}', "llama3_json"),
        ("nothing", None),
    ],
)
def test_the_way_calls_are_written_is_found_in_the_template(
    lesson: str, wanted: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Taught, "lesson", lesson)
    assert detect_tool_call_parser(Taught()) == wanted


def test_a_model_that_calls_of_itself_is_understood() -> None:
    import openai

    said = '<think>Ulm?</think>\n\nLet me see. <tool_call>{"name": "weather", "arguments": '
    said += '{"town": "Ulm"}}</tool_call>'
    engine = PretendEngine(lambda *_: said)
    settings = ServerConfig(model="parrot", port=0, parse_reasoning=True)
    asked: dict[str, Any] = {"model": "parrot", "messages": HELLO, "tools": [WEATHER]}
    with (
        BackgroundServer(create_app(engine, Taught(), settings), settings) as served,
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client,
    ):
        choice = client.chat.completions.create(**asked).choices[0]
        message = choice.message
        assert (message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
        assert message.model_extra == {"reasoning_content": "Ulm?"}
        assert message.tool_calls is not None
        assert message.tool_calls[0].model_dump()["function"] == {
            "name": "weather",
            "arguments": '{"town": "Ulm"}',
        }
        assert engine.asked[-1].visible_special_tokens == ("<tool_call>", "</tool_call>")
        told = {"content": "", "reasoning": "", "name": "", "arguments": ""}
        for piece in client.chat.completions.create(**asked, stream=True):
            delta = piece.choices[0].delta
            told["content"] += delta.content or ""
            told["reasoning"] += (delta.model_extra or {}).get("reasoning_content", "")
            for call in delta.tool_calls or ():
                assert call.function is not None
                told["name"] += call.function.name or ""
                told["arguments"] += call.function.arguments or ""
        assert told == {
            "content": "Let me see.",
            "reasoning": "Ulm?",
            "name": "weather",
            "arguments": '{"town": "Ulm"}',
        }


def test_calls_in_xml_come_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "<tool_call>\n<function=weather>\n<parameter=town>\nUlm\n</parameter>\n"
    said += "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
    monkeypatch.setattr(Taught, "lesson", "<function=f>\n<parameter=a>\n")
    properties = {"town": {"type": "string"}, "days": {"type": "integer"}}
    tool = {
        "type": "function",
        "function": {"name": "weather", "parameters": {"properties": properties}},
    }
    settings = ServerConfig(model="parrot", port=0)
    asked = {"messages": HELLO, "tools": [tool]}
    with BackgroundServer(
        create_app(PretendEngine(lambda *_: said), Taught(), settings), settings
    ) as served:
        (choice,) = send(served.url, "/v1/chat/completions", asked).json["choices"]
        told = events(send(served.url, "/v1/chat/completions", {**asked, "stream": True}).body)
    (call,) = choice["message"]["tool_calls"]
    wanted = '{"town": "Ulm", "days": 3}'
    assert (call["function"]["name"], call["function"]["arguments"]) == ("weather", wanted)
    streamed = [
        call["function"].get("arguments", "")
        for one in told
        for call in one["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert len(streamed) > 3
    assert "".join(streamed) == wanted


def test_a_model_whose_calls_nobody_can_read_is_not_asked_for_them(
    served: BackgroundServer,
) -> None:
    got = send(served.url, "/v1/chat/completions", {"messages": HELLO, "tools": [WEATHER]})
    assert (got.status, got.error["param"]) == (400, "tool_choice")
    asked = {"messages": HELLO, "tools": [WEATHER], "tool_choice": "none"}
    assert send(served.url, "/v1/chat/completions", asked).status == 200


def test_a_way_to_write_calls_that_is_none_is_refused() -> None:
    with pytest.raises(InputError, match="hermes"):
        create_app(PretendEngine(), Bytes(), ServerConfig(model="parrot", tool_call_parser="morse"))


def test_an_answer_can_be_gone_on_with(served: BackgroundServer, engine: PretendEngine) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well,"}]
    path = "/v1/chat/completions"
    asked = {"messages": messages, "continue_final_message": True}
    assert send(served.url, path, asked).status == 200
    assert Bytes().decode(engine.asked[-1].prompt_token_ids) == "user: hi\nassistant: Well,"
    assert (
        send(served.url, path, {"messages": messages, "add_generation_prompt": False}).status == 200
    )
    got = send(served.url, path, {**asked, "add_generation_prompt": True})
    assert (got.status, got.error["param"]) == (400, "continue_final_message")
    got = send(served.url, path, {**asked, "messages": [{"role": "user", "content": ""}]})
    assert got.status == 400
