from typing import Any

import pytest

from meshwright.run.serve.request import Request
from meshwright.run.serve.sampling_params import StructuredOutputsParams
from meshwright.run.serve.server import BackgroundServer
from tests.run.serve.server.pretend import PretendEngine
from tests.run.serve.server.wire import events, send


def test_a_prompt_is_continued(client: Any, engine: PretendEngine) -> None:
    got = client.completions.create(model="parrot", prompt="hello", max_tokens=50)
    assert got.choices[0].text == ">hello"
    assert got.choices[0].finish_reason == "stop"
    assert got.usage.prompt_tokens == 6  # its first token and five bytes
    assert got.usage.completion_tokens == 7  # six bytes and the end
    assert got.usage.prompt_tokens_details.cached_tokens == 2


def test_sixteen_tokens_come_unless_told(client: Any) -> None:
    got = client.completions.create(model="bird", prompt="x" * 40)
    assert got.choices[0].text == ">" + "x" * 15
    assert got.choices[0].finish_reason == "length"


def test_streamed_text_is_the_same_text(client: Any) -> None:
    stream = client.completions.create(
        model="parrot",
        prompt="hello there",
        max_tokens=50,
        stream=True,
        stream_options={"include_usage": True},
    )
    pieces = list(stream)
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == ">hello there"
    assert pieces[-2].choices[0].finish_reason == "stop"
    assert pieces[-1].choices == []
    assert pieces[-1].usage.completion_tokens == 13


def test_several_prompts_and_answers_keep_their_order(client: Any) -> None:
    asked: dict[str, Any] = {"model": "parrot", "prompt": ["one", "two"], "n": 2, "max_tokens": 20}
    whole = client.completions.create(**asked)
    texts = ["0>one", "1>one", "0>two", "1>two"]
    assert [choice.text for choice in whole.choices] == texts
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    streamed = ["", "", "", ""]
    for piece in client.completions.create(**asked, stream=True):
        for choice in piece.choices:
            streamed[choice.index] += choice.text
    assert streamed == texts


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105], [104]], ["hi", "h"]])
def test_prompts_may_be_tokens(client: Any, prompt: list[Any]) -> None:
    got = client.completions.create(model="parrot", prompt=prompt)
    assert [choice.text for choice in got.choices] == [">hi", ">h"][: len(got.choices)]


def test_how_tokens_are_drawn_reaches_the_engine(client: Any, engine: PretendEngine) -> None:
    client.completions.create(
        model="polly",
        prompt="hi",
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=1,
        frequency_penalty=-1,
        seed=7,
        stop=["a", "bc"],
        logit_bias={"50": -100},
        user="me",
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [3],
            "priority": -4,
            "guided_regex": "[ab]+",
        },
    )
    ask: Request = engine.asked[-1]
    sampling = ask.sampling_params
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert (sampling.seed, sampling.stop, sampling.stop_token_ids) == (7, ("a", "bc"), (3,))
    assert (sampling.logit_bias, sampling.min_tokens) == ({50: -100}, 2)
    assert (sampling.max_tokens, sampling.ignore_eos) == (9, True)
    assert sampling.structured_outputs == StructuredOutputsParams(kind="regex", text="[ab]+")
    # Clients of vLLM send a lower number for what is to go first.
    assert (ask.tenant, ask.priority, ask.lora_name) == ("me", 4, "polly")


def test_likely_tokens_are_told_with_their_places(client: Any) -> None:
    got = client.completions.create(model="parrot", prompt="hi", logprobs=2)
    told = got.choices[0].logprobs
    assert told.tokens[:3] == [">", "h", "i"]
    assert told.text_offset[:3] == [0, 1, 2]
    assert told.token_logprobs[0] == -0.5
    assert told.top_logprobs[1] == {"h": -1.0, "i": -2.0}
    # What could not come is told as a number that JSON has.
    assert told.token_logprobs[-1] == -9999.0


def test_echo_tells_the_prompt_and_how_likely_it_was(client: Any) -> None:
    got = client.completions.create(
        model="parrot", prompt="hi", echo=True, logprobs=0, max_tokens=0
    )
    choice = got.choices[0]
    assert (choice.text, choice.finish_reason) == ("hi", "length")
    assert choice.logprobs.tokens == ["<257>", "h", "i"]
    assert choice.logprobs.text_offset == [0, 0, 1]  # nobody wrote the first
    assert choice.logprobs.token_logprobs == [None, -2.0, -2.0]
    assert choice.logprobs.top_logprobs == [None, {"h": -2.0}, {"i": -2.0}]
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (3, 0)
    got = client.completions.create(model="parrot", prompt="hi", echo=True, max_tokens=4)
    assert got.choices[0].text == "hi>hi"


def test_tokens_that_are_parts_of_a_character_keep_their_bytes_and_places(client: Any) -> None:
    asked = {"model": "parrot", "prompt": "a🦖b", "echo": True, "logprobs": 1, "max_tokens": 0}
    told = client.completions.create(**asked).choices[0].logprobs
    parts = [r"bytes:\xf0", r"bytes:\x9f", r"bytes:\xa6", r"bytes:\x96"]
    assert told.tokens == ["<257>", "a", *parts, "b"]
    assert told.text_offset == [0, 0, 1, 1, 1, 1, 2]
    messages = [{"role": "user", "content": "🦖"}]
    chat = client.chat.completions.create(model="parrot", messages=messages, logprobs=True)
    spelled = [byte for each in chat.choices[0].logprobs.content for byte in each.bytes]
    assert "🦖".encode() in bytes(spelled)


def test_echo_gives_a_prompt_back_as_it_was_written(client: Any) -> None:
    asked = {"model": "parrot", "echo": True, "max_tokens": 0}
    assert client.completions.create(prompt="<257>hi", **asked).choices[0].text == "<257>hi"
    assert client.completions.create(prompt=[257, 104], **asked).choices[0].text == "<257>h"


def test_an_engine_that_cannot_tell_of_prompts_is_not_believed(
    served: BackgroundServer, engine: PretendEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "tells_of_prompts", False)
    for stream in (False, True):
        asked = {"prompt": "hi", "echo": True, "logprobs": 1, "stream": stream}
        got = send(served.url, "/v1/completions", asked)
        assert (got.status, got.error["param"]) == (501, "logprobs")


def test_tokens_are_told_where_asked_for(served: BackgroundServer) -> None:
    asked = {"prompt": "hi", "return_token_ids": True}
    whole = send(served.url, "/v1/completions", asked).json["choices"][0]
    assert whole["prompt_token_ids"] == [257, 104, 105]
    assert whole["token_ids"] == [62, 104, 105, 256]
    streamed = events(send(served.url, "/v1/completions", {**asked, "stream": True}).body)
    ids = [token for piece in streamed for token in piece["choices"][0]["token_ids"]]
    assert ids == whole["token_ids"]


def test_counts_come_with_every_event_where_asked_for(served: BackgroundServer) -> None:
    asked = {"prompt": "hi", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    streamed = events(send(served.url, "/v1/completions", asked).body)
    assert [piece["usage"]["completion_tokens"] for piece in streamed] == [1, 2, 3, 4, 4]


def test_embeddings_are_of_the_adapter_that_is_named(served: BackgroundServer) -> None:
    found = [
        send(served.url, "/v1/embeddings", {"input": "a", "model": model}).json
        for model in ("parrot", "polly")
    ]
    assert [each["model"] for each in found] == ["parrot", "polly"]
    assert [each["data"][0]["embedding"][0] for each in found] == [1.0, 2.0]
