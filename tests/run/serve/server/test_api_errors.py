import json
import re
from typing import Any

import pytest

from meshwright.run.serve.client.output_stream import OutputStream
from meshwright.run.serve.engine_client import EngineDeadError
from meshwright.run.serve.request import Request, RequestOutput
from meshwright.run.serve.server import BackgroundServer, ServerConfig, create_app
from meshwright.run.serve.server.protocol.request_schema import ChatCompletionRequest
from meshwright.run.serve.server.request_decoder import drop_unknown_nulls
from tests.run.serve.server.pretend import Bytes, PretendEngine
from tests.run.serve.server.serving import serving
from tests.run.serve.server.wire import events, send

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
SAID = {"type": "text", "text": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (TEXT, {}, 400, "prompt"),
        (TEXT, [], 400, None),
        (TEXT, {"prompt": 3}, 400, "prompt"),
        (TEXT, {"prompt": ["a", 1]}, 400, "prompt"),
        (TEXT, {"prompt": [1, "a"]}, 400, "prompt"),
        (TEXT, {"prompt": [[1], [-1]]}, 400, "prompt[1][0]"),
        (TEXT, {"prompt": [260]}, 400, "prompt"),
        (TEXT, {"prompt": []}, 400, "prompt"),
        (TEXT, {"prompt": [[]]}, 400, "prompt"),
        (TEXT, {"prompt": ["a"] * 257}, 400, "prompt"),
        (TEXT, {"prompt": "a" * 5000}, 400, "prompt"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": 5000}, 400, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": 2, "min_tokens": 3}, 400, "min_tokens"),
        (TEXT, {"prompt": "a", "best_of": 3}, 400, "best_of"),
        (TEXT, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
        (TEXT, {"prompt": "a", "n": 17}, 400, "n"),
        (TEXT, {"prompt": "a", "n": 0}, 400, "n"),
        (TEXT, {"prompt": "a", "temperature": -1}, 400, "temperature"),
        (TEXT, {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        (TEXT, {"prompt": "a", "top_p": 0}, 400, "top_p"),
        (TEXT, {"prompt": "a", "top_p": 1e-12}, 400, "top_p"),
        (TEXT, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
        (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"400": 1}}, 400, "logit_bias"),
        (TEXT, {"prompt": "a", "stop": [""]}, 400, "stop"),
        (TEXT, {"prompt": "a", "stop_token_ids": [999]}, 400, "stop_token_ids"),
        (TEXT, {"prompt": "a", "stream_options": {}}, 400, "stream_options"),
        (TEXT, {"prompt": "a", "guided_choice": []}, 400, "guided_choice"),
        (TEXT, {"prompt": "a", "guided_regex": "a", "guided_json": {}}, 400, "guided_regex"),
        (TEXT, {"prompt": "a", "temprature": 1}, 400, "temprature"),
        (TEXT, {"prompt": "a", "model": "crow"}, 404, "model"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {"messages": [{"content": "a"}]}, 400, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "contents": "a"}]}, 400, "messages[0].contents"),
        (CHAT, {"messages": [{**HELLO[0], "prefix": True}]}, 400, "messages[0].prefix"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
            400,
            "messages[0].function_call",
        ),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 5000}, 400, "max_completion_tokens"),
        (CHAT, {"messages": [{"role": "alien", "content": "a"}]}, 400, "messages"),
        (CHAT, {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, 400, "max_tokens"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, 400, "top_logprobs"),
        (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
        (CHAT, {"messages": HELLO, "tools": [TOOL, TOOL]}, 400, "tools"),
        (
            CHAT,
            {"messages": HELLO, "response_format": SCHEMA},
            400,
            "response_format.json_schema.schema",
        ),
        (
            CHAT,
            {"messages": HELLO, "chat_template_kwargs": {"messages": []}},
            400,
            "chat_template_kwargs.messages",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content[0]",
        ),
        ("/v1/embeddings", {"input": ""}, 200, None),
        ("/v1/embeddings", {"input": [[]]}, 400, "input"),
        ("/v1/embeddings", {"input": "a", "dimensions": 3}, 400, "dimensions"),
        ("/tokenize", {}, 400, "prompt"),
        ("/detokenize", {"tokens": [1000]}, 400, "tokens"),
        ("/detokenize", {"tokens": "ab"}, 400, "tokens"),
    ],
)
def test_bad_input_is_refused_by_name(
    served: BackgroundServer, path: str, body: Any, status: int, param: str | None
) -> None:
    got = send(served.url, path, body)
    assert got.status == status, got.body
    if status != 200:
        assert got.error["param"] == param, got.error
        assert got.error["message"]
        assert got.error["type"] in {"invalid_request_error", "not_found_error"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, {"prompt": "a", "temprature": None, "logit_bias": {"97": 1}}),
        (CHAT, {"messages": [{**HELLO[0], "prefix": None, "tool_calls": None}], "thinking": None}),
        (CHAT, {"messages": [{"role": "user", "content": [{**SAID, "id": None}]}]}),
        (CHAT, {"messages": HELLO, "stream": True, "stream_options": {"other": None}}),
        ("/v1/embeddings", {"input": "a", "input_type": None}),
    ],
)
def test_a_field_that_is_not_known_and_null_is_not_given(
    served: BackgroundServer, path: str, body: Any
) -> None:
    got = send(served.url, path, body)
    assert got.status == 200, got.body


def test_beside_a_null_one_a_field_with_a_value_is_still_refused(served: BackgroundServer) -> None:
    body = {"messages": [{**HELLO[0], "id": None, "prefix": True}], "thinking": None}
    got = send(served.url, CHAT, body)
    assert got.status == 400
    assert got.error["param"] == "messages[0].prefix"


def test_nulls_of_values_that_a_client_made_up_stay() -> None:
    schema = b'{"type":"json_schema","json_schema":{"schema":{"enum":[ null ],"default": null}}}'
    kept = b'{"messages":[],"response_format":' + schema + b"}"
    given = b'{"messages":[], "of_another": null ,"response_format":' + schema + b"}"
    assert json.loads(drop_unknown_nulls(given, ChatCompletionRequest)) == json.loads(kept)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"n": 1e999}', b"null"]
)
def test_a_body_that_is_no_json_is_refused(served: BackgroundServer, body: bytes) -> None:
    got = send(served.url, TEXT, body)
    assert got.status == 400
    assert got.error["message"]


def test_a_demanded_call_that_breaks_off_says_so(
    client: Any, engine: PretendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "says", lambda *_: '{"town": "U')
    got = client.chat.completions.create(
        model="parrot",
        messages=HELLO,
        tools=[TOOL],
        tool_choice={"type": "function", "function": {"name": "f"}},
        max_tokens=4,
    )
    assert got.choices[0].finish_reason == "length"


def test_what_the_engine_refuses_is_the_clients_fault(
    served: BackgroundServer, engine: PretendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "refuses", lambda _: True)
    for stream in (False, True):
        got = send(served.url, TEXT, {"prompt": ["a", "b"], "stream": stream})
        assert got.status == 400
        assert got.error["param"] == "structured_outputs"


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"guided_regex": "("}, "guided_regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"guided_json": {"type": "x"}}, "guided_json"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
    ],
)
def test_a_form_that_the_engine_refuses_has_the_name_that_the_client_gave_it(
    served: BackgroundServer,
    engine: PretendEngine,
    monkeypatch: pytest.MonkeyPatch,
    form: dict[str, Any],
    param: str,
) -> None:
    monkeypatch.setattr(engine, "refuses", lambda _: True)
    told = send(served.url, CHAT, {"messages": HELLO, **form}).error
    assert (told["param"], told["message"]) == (param, f"{param}: cannot be followed")


def test_strange_places_and_methods_have_the_same_errors(served: BackgroundServer) -> None:
    assert send(served.url, "/v1/nothing").error["message"] == "There is no GET /v1/nothing"
    got = send(served.url, TEXT)
    assert (got.status, got.headers["allow"]) == (405, "POST")
    assert got.error["type"] == "invalid_request_error"
    # Not elsewhere, which over a proxy would be an address without certificates.
    assert send(served.url, f"{TEXT}/", {"prompt": "a"}).status == 404


def test_the_official_client_raises_its_own_errors(client: Any) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="crow"):
        client.completions.create(model="crow", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="parrot", prompt="a" * 5000)
    assert caught.value.code == "context_length_exceeded"
    # LangChain and LiteLLM know it by these words.
    assert "This model's maximum context length is 4096 tokens" in str(caught.value)
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is"):
        client.completions.create(model="parrot", prompt="a", max_tokens=5000)


def test_what_breaks_in_a_stream_is_said_in_it(
    client: Any, engine: PretendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    import openai

    monkeypatch.setattr(engine, "fails_at", 3)
    stream = client.completions.create(model="parrot", prompt="hello", stream=True)
    said: list[str] = []
    with pytest.raises(openai.APIError, match="the cat was at it"):
        said.extend(piece.choices[0].text for piece in stream)
    assert said == [">", "h", "e"]
    with pytest.raises(openai.InternalServerError, match="the cat was at it"):
        client.completions.create(model="parrot", prompt="hello")


def test_what_came_before_a_break_is_told_before_it() -> None:
    class Sudden(PretendEngine):
        """Breaks before anybody has read what it said."""

        def generate(self, ask: Request) -> OutputStream:
            inbox = OutputStream(ask.sampling_params.n, lambda: None)
            for text in ("he", "llo"):
                inbox.put(RequestOutput(token_ids=tuple(text.encode()), text=text))
            inbox.fail(EngineDeadError("the cat was at it"))
            return inbox

    settings = ServerConfig(model="parrot", port=0)
    with BackgroundServer(create_app(Sudden(), Bytes(), settings), settings) as served:
        got = send(served.url, TEXT, {"prompt": "a", "stream": True})
        *said, last = events(got.body)
        assert [each["choices"][0]["text"] for each in said] == ["he", "llo"]
        assert last["error"]["message"] == "the cat was at it"
        whole = send(served.url, TEXT, {"prompt": "a"})
        assert (whole.status, whole.error["code"]) == (503, "engine_error")
        assert int(whole.headers["retry-after"]) > 0


def test_a_fault_of_the_server_is_told_without_its_details(
    served: BackgroundServer, engine: PretendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(*_: object) -> str:
        raise RuntimeError("secret of the house")

    def failures() -> float:
        page = send(served.url, "/metrics").body.decode()
        found = re.search(r'path="/v1/completions",status="500"} (\S+)', page)
        return float(found[1]) if found else 0.0

    before = failures()
    monkeypatch.setattr(engine, "says", breaks)
    for stream in (False, True):
        named = {"x-request-id": "broken-1"}
        got = send(served.url, TEXT, {"prompt": "a", "stream": stream}, headers=named)
        assert (got.status, got.error["type"]) == (500, "server_error")
        assert b"secret" not in got.body
        assert got.headers["x-request-id"] == "broken-1", "by which the log is searched"
    assert failures() == before + 2


def test_vectors_of_an_engine_that_breaks_can_be_asked_for_again(
    served: BackgroundServer, engine: PretendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks(*_: object, **__: object) -> list[list[float]]:
        raise EngineDeadError("the engine's process was ended by SIGKILL")

    monkeypatch.setattr(engine, "embed", breaks)
    got = send(served.url, "/v1/embeddings", {"input": "a"})
    assert (got.status, got.error["code"]) == (503, "engine_error")
    assert "SIGKILL" in got.error["message"]
    assert got.headers["retry-after"] == "10"


def test_texts_are_embedded_up_to_what_the_engine_says(
    served: BackgroundServer, engine: PretendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "max_embed_len", 8)
    assert send(served.url, "/v1/embeddings", {"input": [[65] * 8]}).status == 200
    got = send(served.url, "/v1/embeddings", {"input": [[65] * 9]})
    assert (got.status, got.error["code"]) == (400, "context_length_exceeded")
    assert "1 to 8" in got.error["message"]


def test_every_error_of_a_type_names_where_it_is(served: BackgroundServer) -> None:
    got = send(served.url, CHAT, {"messages": [{"role": "user", "content": [{"type": 3}]}]})
    assert got.error["param"] == "messages[0].content[0].type"
    assert json.loads(got.body).keys() == {"error"}


def test_a_prompt_that_leaves_little_room_gets_what_there_is(
    served: BackgroundServer, engine: PretendEngine
) -> None:
    prompt = [97] * (engine.max_model_len - 3)
    got = send(served.url, "/v1/completions", {"prompt": prompt})
    assert (got.status, got.json["usage"]["completion_tokens"]) == (200, 3)
    got = send(served.url, "/v1/completions", {"prompt": prompt, "max_tokens": 16})
    assert (got.status, got.error["param"]) == (400, "max_tokens")


def test_a_change_that_failed_is_told_and_the_engine_answers_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def wake(_: object) -> None:
        raise EngineDeadError("it cannot wake, and sleeps on: out of memory")

    with serving(allow_unauthenticated_admin=True) as (served, engine):
        monkeypatch.setattr(engine, "wake_up", wake)
        got = send(served.url, "/wake_up", {})
        assert got.status == 503
        assert got.error["code"] == "failed"
        assert "sleeps on: out of memory" in got.error["message"]
        assert send(served.url, TEXT, {"prompt": "a"}).status == 200
