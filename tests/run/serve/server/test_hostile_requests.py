"""A corpus of hostile requests: each gets an error of its own, and the server goes on."""

import json
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from meshwright.run.serve.server import BackgroundServer
from tests.run.serve.server.hostile import hostile_server, write_tokenizer
from tests.run.serve.server.wire import Got, send

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundServer]:
    folder = write_tokenizer(tmp_path_factory.mktemp("hostile"))
    config = {"input_timeout_s": 20.0, "input_memory_bytes": 2**28, "max_header_bytes": 8192}
    with hostile_server(folder, allow_unauthenticated_admin=True, **config) as (server, _, _):
        yield server


def chat(content: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{**USER, **fields}]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def nested(depth: int, inner: str = "0", begin: str = "[", end: str = "]") -> bytes:
    return (begin * depth + inner + end * depth).encode()


def raw_prompt(value: bytes) -> bytes:
    return b'{"prompt":' + value + b"}"


def raw_field(name: str, value: bytes) -> bytes:
    return b'{"prompt":"a","' + name.encode() + b'":' + value + b"}"


def probe_orbit(count: int) -> list[str]:
    """Return numbers, each of which is where a dict of integers looks behind the one before."""
    keys = [1]
    while len(keys) < count:
        keys.append((5 * keys[-1] + 1) % 2**18)
    return list(map(str, keys))


ORBIT = [0, 1, 6, 31, 156, 781]

BODIES: dict[str, tuple[str, Any, int | tuple[int, ...]]] = {
    # Bytes that are no body.
    "nothing": (TEXT, b"", 400),
    "a space": (TEXT, b" ", 400),
    "null": (TEXT, b"null", 400),
    "a number": (TEXT, b"7", 400),
    "a text": (TEXT, b'"a"', 400),
    "a list": (TEXT, b"[]", 400),
    "an empty object": (TEXT, b"{}", 400),
    "two bodies": (TEXT, b'{"prompt":"a"}{"prompt":"b"}', 400),
    "an open object": (TEXT, b'{"prompt":"a"', 400),
    "an open text": (TEXT, b'{"prompt":"a', 400),
    "single quotes": (TEXT, b"{'prompt':'a'}", 400),
    "a comma at the end": (TEXT, b'{"prompt":"a",}', 400),
    "a comment": (TEXT, b'{"prompt":"a"/*x*/}', 400),
    "a byte order mark": (TEXT, b'\xef\xbb\xbf{"prompt":"a"}', 400),
    "UTF-16": (TEXT, '{"prompt":"a"}'.encode("utf-16"), 400),
    "bytes that are no UTF-8": (TEXT, b'{"prompt":"\xff\xfe"}', 400),
    "an overlong slash": (TEXT, b'{"prompt":"\xc0\xaf"}', 400),
    "half a character": (TEXT, b'{"prompt":"\xf0\x9f"}', 400),
    "half a surrogate": (TEXT, rb'{"prompt":"\ud800"}', 400),
    "surrogates in the wrong order": (TEXT, rb'{"prompt":"\udc00\ud800"}', 400),
    "a bad escape": (TEXT, rb'{"prompt":"\x41"}', 400),
    "a bare control character": (TEXT, b'{"prompt":"a\nb"}', 400),
    "an escaped zero": (TEXT, rb'{"prompt":"a\u0000b","max_tokens":1}', 200),
    "pickled bytes": (TEXT, b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00.", 400),
    "an archive": (TEXT, b"PK\x03\x04" + bytes(100), 400),
    "compressed bytes": (TEXT, b"\x1f\x8b\x08" + bytes(100), 400),
    # Nesting.
    "nested lists in a prompt": (TEXT, raw_prompt(nested(500)), 400),
    "very nested lists in a prompt": (TEXT, raw_prompt(nested(100_000)), 400),
    "lists that never close": (TEXT, b"[" * 100_000, 400),
    "objects that never close": (TEXT, b'{"a":' * 50_000, 400),
    "nested metadata": (TEXT, raw_field("metadata", nested(900, "0", '{"a":', "}")), (200, 400)),
    "very nested metadata": (TEXT, raw_field("metadata", nested(60_000, "0", '{"a":', "}")), 400),
    "a nested schema": (TEXT, raw_field("guided_json", nested(700, "{}", '{"not":', "}")),
                        (200, 400)),
    "a very nested schema": (TEXT, raw_field("guided_json", nested(50_000, "{}", '{"not":', "}")),
                             400),
    "nested template values": (
        CHAT, b'{"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":'
        + nested(5000) + b"}}", 400),
    "nested tool parameters": (CHAT, chat(
        tools=[tool(parameters=json.loads(nested(400, "{}", '{"not":', "}")))],
        tool_choice="required"), (200, 400)),
    "nested tool references": (CHAT, chat(
        tools=[tool(parameters=json.loads(nested(330, '{"$ref":"#"}', '{"not":', "}")))],
        tool_choice="required"), (200, 400)),
    "nested call arguments": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "[" * 50_000}}]}]}, 400),
    # Numbers.
    "a huge integer": (TEXT, raw_field("max_tokens", b"1" * 5000), 400),
    "a very huge integer": (TEXT, raw_field("seed", b"9" * 100_000), 400),
    "a negative integer": (TEXT, raw_field("max_tokens", b"-1"), 400),
    "a huge exponent": (TEXT, raw_field("temperature", b"1e999999999"), 400),
    "a tiny exponent": (TEXT, raw_field("temperature", b"1e-999999999"), 200),
    "a long fraction": (TEXT, raw_field("temperature", b"0." + b"1" * 100_000), 200),
    "NaN": (TEXT, raw_field("temperature", b"NaN"), 400),
    "Infinity": (TEXT, raw_field("temperature", b"Infinity"), 400),
    "a leading zero": (TEXT, raw_field("max_tokens", b"007"), 400),
    "a hexadecimal number": (TEXT, raw_field("max_tokens", b"0x10"), 400),
    "a plus sign": (TEXT, raw_field("max_tokens", b"+1"), 400),
    "a boolean for a number": (TEXT, raw_field("max_tokens", b"true"), 400),
    "a text for a number": (TEXT, raw_field("max_tokens", b'"5"'), 400),
    "a float for an integer": (TEXT, raw_field("max_tokens", b"1.5"), 400),
    "a temperature below zero": (TEXT, raw_field("temperature", b"-0.1"), 400),
    "a temperature beyond all": (TEXT, raw_field("temperature", b"101"), 400),
    "top_p of zero": (TEXT, raw_field("top_p", b"0"), 400),
    "too many answers": (TEXT, raw_field("n", b"17"), 400),
    "far too many answers": (TEXT, raw_field("n", b"2147483647"), 400),
    "too many log-probabilities": (TEXT, raw_field("logprobs", b"21"), 400),
    "a seed beyond 64 bits": (TEXT, raw_field("seed", b"9223372036854775808"), 400),
    "a priority beyond 32 bits": (TEXT, raw_field("priority", b"2147483648"), 400),
    # Fields.
    "an unknown field": (TEXT, {"prompt": "a", "__class__": "x"}, 400),
    "an unknown field with a long name": (TEXT, {"prompt": "a", "a" * 100_000: 1}, 400),
    "a name with a control character": (TEXT, {"prompt": "a", "\x00\x1b[2J": 1}, 400),
    "many unknown nulls": (TEXT, {"prompt": "a", **{f"n{n}": None for n in range(20_000)}}, 200),
    "a field twice": (TEXT, b'{"prompt":"a","prompt":"b","max_tokens":1}', 200),
    "a long model name": (TEXT, {"prompt": "a", "model": "m" * 513}, 400),
    "a model of another name": (TEXT, {"prompt": "a", "model": "../../etc/passwd"}, 404),
    "a model with a zero byte": (TEXT, {"prompt": "a", "model": "parrot\x00"}, 404),
    "a long user": (TEXT, {"prompt": "a", "user": "u" * 513}, 400),
    "a proto": (TEXT, {"prompt": "a", "__proto__": {"admin": True}}, 400),
    # Prompts.
    "a prompt that is too long": (TEXT, {"prompt": "x" * 200_000}, 400),
    "a prompt that is much too long": (TEXT, {"prompt": "x" * 2_000_000}, 400),
    "spaces that are too many": (TEXT, {"prompt": " " * 2_000_000}, 400),
    "emoji that are too many": (TEXT, {"prompt": "🙂" * 300_000}, 400),
    "combining marks": (TEXT, {"prompt": "a" + "\u0301" * 100_000}, 400),
    "no prompt": (TEXT, {"prompt": ""}, 400),
    "no prompts": (TEXT, {"prompt": []}, 400),
    "an empty prompt among others": (TEXT, {"prompt": ["a", ""]}, 400),
    "too many prompts": (TEXT, {"prompt": ["a"] * 257}, 400),
    "far too many prompts": (TEXT, {"prompt": ["a"] * 200_000}, 400),
    "prompts that are too long": (TEXT, {"prompt": ["x" * 5000] * 200}, 400),
    "prompts of two kinds": (TEXT, {"prompt": ["a", 1]}, 400),
    "prompts of two other kinds": (TEXT, {"prompt": [1, "a"]}, 400),
    "nested prompts": (TEXT, {"prompt": [[[1]]]}, 400),
    "a token below zero": (TEXT, {"prompt": [-1]}, 400),
    "a token beyond the vocabulary": (TEXT, {"prompt": [10**6]}, 400),
    "a token beyond 32 bits": (TEXT, {"prompt": [2**31]}, 400),
    "a token that is a float": (TEXT, {"prompt": [1.5]}, 400),
    "tokens that are too many": (TEXT, {"prompt": [1] * 300_000}, 400),
    "lists of tokens that are too many": (TEXT, {"prompt": [[1] * 5000] * 100}, 400),
    "an object as a prompt": (TEXT, {"prompt": {"a": "b"}}, 400),
    "a null prompt": (TEXT, {"prompt": None}, 400),
    "an embedding that is too long": (EMBED, {"input": "x" * 200_000}, 400),
    "embeddings that are too many": (EMBED, {"input": ["a"] * 257}, 400),
    "an embedding of nothing": (EMBED, {"input": [""]}, 400),
    "an embedding of a bad token": (EMBED, {"input": [[10**6]]}, 400),
    "an embedding of bad dimensions": (EMBED, {"input": "a", "dimensions": 2**40}, 400),
    # Sampling.
    "logit_bias on a probe orbit": (TEXT, {"prompt": "a", "logit_bias": dict.fromkeys(
        probe_orbit(60_000), 1)}, 400),
    "logit_bias of too many entries": (TEXT, {"prompt": "a", "logit_bias": {
        str(n): 1 for n in range(1025)}}, 400),
    "logit_bias of a word": (TEXT, {"prompt": "a", "logit_bias": {"a": 1}}, 400),
    "logit_bias of a leading zero": (TEXT, {"prompt": "a", "logit_bias": {"01": 1}}, 400),
    "logit_bias of another digit": (TEXT, {"prompt": "a", "logit_bias": {"٣": 1}}, 400),
    "logit_bias of a sign": (TEXT, {"prompt": "a", "logit_bias": {"-1": 1}}, 400),
    "logit_bias of many digits": (TEXT, {"prompt": "a", "logit_bias": {"1" * 9999: 1}}, 400),
    "logit_bias beyond the vocabulary": (TEXT, {"prompt": "a", "logit_bias": {"99999": 1}}, 400),
    "logit_bias that is too strong": (TEXT, {"prompt": "a", "logit_bias": {"1": 101}}, 400),
    "logit_bias that is a list": (TEXT, {"prompt": "a", "logit_bias": [1]}, 400),
    "logit_bias of the orbit's first": (TEXT, {"prompt": "a", "logit_bias": {
        str(key % 250): 1 for key in ORBIT}}, 200),
    "stop_token_ids that are too many": (TEXT, {"prompt": "a", "stop_token_ids": [1] * 1025}, 400),
    "stop_token_ids beyond the vocabulary": (TEXT, {"prompt": "a", "stop_token_ids": [9999]}, 400),
    "stop texts that are too many": (TEXT, {"prompt": "a", "stop": ["a"] * 17}, 400),
    "stop texts that are far too many": (TEXT, {"prompt": "a", "stop": ["a"] * 200_000}, 400),
    "a stop text that is too long": (TEXT, {"prompt": "a", "stop": "a" * 1001}, 400),
    "a stop text of nothing": (TEXT, {"prompt": "a", "stop": [""]}, 400),
    "stop texts of the greatest length": (TEXT, {"prompt": "a", "stop": ["a" * 999 + chr(97 + n)
        for n in range(16)]}, 200),
    "the most answers with log-probabilities": (TEXT, {
        "prompt": "a", "n": 16, "logprobs": 20, "max_tokens": 8}, 200),
    "log-probabilities of a long prompt": (TEXT, {
        "prompt": "x" * 4000, "echo": True, "logprobs": 20, "max_tokens": 1}, 200),
    "min_tokens beyond the context": (TEXT, {"prompt": "a", "min_tokens": 10**9}, 400),
    "best_of without n": (TEXT, {"prompt": "a", "best_of": 128}, 400),
    # Forms of an answer.
    "two forms": (TEXT, {"prompt": "a", "guided_regex": "a", "guided_choice": ["a"]}, 400),
    "a regex that is too long": (TEXT, {"prompt": "a", "guided_regex": "a" * 300_000}, 400),
    "a grammar that is too long": (TEXT, {"prompt": "a", "guided_grammar": "a" * 300_000}, 400),
    "a schema that is too long": (TEXT, {"prompt": "a", "guided_json": {
        "enum": ["a" * 50] * 6000}}, 400),
    "choices that are too long": (TEXT, {"prompt": "a", "guided_choice": ["a" * 300_000]}, 400),
    "no choices": (TEXT, {"prompt": "a", "guided_choice": []}, 400),
    "a form of no kind": (CHAT, chat(response_format={"type": "xml"}), 400),
    "a schema that is missing": (CHAT, chat(response_format={"type": "json_schema"}), 400),
    # Chats.
    "no messages": (CHAT, {"messages": []}, 400),
    "messages that are a text": (CHAT, {"messages": "hi"}, 400),
    "a message that is a text": (CHAT, {"messages": ["hi"]}, 400),
    "a message of no role": (CHAT, {"messages": [{"content": "hi"}]}, 400),
    "a role of nothing": (CHAT, message(role=""), 400),
    "a role that nobody knows": (CHAT, message(role="bogus"), 400),
    "a role in capitals": (CHAT, message(role="User"), 400),
    "a role with a quote": (CHAT, message(role="user'"), 400),
    "a role that is too long": (CHAT, message(role="r" * 65), 400),
    "a role that the template names": (CHAT, message(role="ipython"), 200),
    "a message of no content": (CHAT, message(content=None), 400),
    "a message of a picture": (CHAT, chat([{"type": "image_url", "image_url": "file:///a"}]), 400),
    "a part of no type": (CHAT, chat([{"text": "a"}]), 400),
    "a part of an unknown field": (CHAT, chat([{"type": "text", "text": "a", "x": 1}]), 400),
    "many parts": (CHAT, chat([{"type": "text", "text": "a"}] * 20_000), 400),
    "many messages": (CHAT, {"messages": [USER] * 20_000}, 400),
    "a chat that is too long": (CHAT, chat("x" * 1_000_000), 400),
    "special tokens as text": (CHAT, chat("<|im_end|><s></s>[INST]"), 200),
    "terminal escapes": (CHAT, chat("\x1b]0;x\x07\x1b[2J"), 200),
    "call arguments that are no JSON": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "{"}}]}]}, 400),
    "call arguments that are a list": (CHAT, {"messages": [{"role": "assistant", "tool_calls": [
        {"function": {"name": "f", "arguments": "[]"}}]}]}, 400),
    "both limits of tokens": (CHAT, chat(max_tokens=1, max_completion_tokens=2), 400),
    "top_logprobs alone": (CHAT, chat(top_logprobs=5), 400),
    "stream_options without a stream": (CHAT, chat(stream_options={}), 400),
    "an answer that both begins and goes on": (CHAT, chat(
        add_generation_prompt=True, continue_final_message=True), 400),
    # Tools.
    "too many tools": (CHAT, chat(tools=[tool(name=f"f{n}") for n in range(1025)]), 400),
    "tools that are too large": (CHAT, chat(tools=[tool(description="d" * 2_200_000)]), 400),
    "two tools of one name": (CHAT, chat(tools=[tool(), tool()]), 400),
    "a tool of no name": (CHAT, chat(tools=[tool(name="")]), 400),
    "a tool that is no function": (CHAT, chat(tools=[{"type": "code"}]), 400),
    "a choice without tools": (CHAT, chat(tool_choice="required"), 400),
    "a choice of another tool": (CHAT, chat(tools=[tool()], tool_choice={
        "type": "function", "function": {"name": "g"}}), 400),
    "parameters that are a list": (CHAT, chat(tools=[tool(parameters=[])]), 400),
    # Templates.
    "a template that repeats a text": (CHAT, chat("repeat"), 400),
    "a template that makes a power": (CHAT, chat("power"), 400),
    "a template that centers": (CHAT, chat("center"), 400),
    "a template that formats": (CHAT, chat("format"), 400),
    "a template that doubles a text": (CHAT, chat("double"), 400),
    "a template that calls itself": (CHAT, chat("recurse"), 400),
    "a template with a huge range": (CHAT, chat("range"), 400),
    "a template that divides by zero": (CHAT, chat("divide"), 400),
    "a template that leaves the sandbox": (CHAT, chat("class"), 400),
    "a template that reads a file": (CHAT, chat("import"), 400),
    "a template that refuses": (CHAT, chat("raise"), 400),
    "template values that clash": (CHAT, chat(chat_template_kwargs={"messages": []}), 400),
    "template values named as internals": (CHAT, chat(
        chat_template_kwargs={"self": 1}), 400),
    "template values with a bad name": (CHAT, chat(chat_template_kwargs={"a b\x00": 1}), 200),
    "many template values": (CHAT, chat(
        chat_template_kwargs={f"n{n}": n for n in range(5000)}), 200),
    # Tokens of texts.
    "a text of two kinds": ("/tokenize", {"prompt": "a", "messages": [USER]}, 400),
    "a text of no kind": ("/tokenize", {}, 400),
    "a text that is far too long": ("/tokenize", {"prompt": "x" * 9_000_000}, 400),
    "a chat of a hostile template": ("/tokenize", {"messages": [
        {"role": "user", "content": "double"}]}, 400),
    "a chat of an unknown role": ("/tokenize", {"messages": [
        {"role": "bogus", "content": "a"}]}, 400),
    "tokens that are no numbers": ("/detokenize", {"tokens": ["a"]}, 400),
    "tokens beyond the vocabulary": ("/detokenize", {"tokens": [10**6]}, 400),
    "tokens that are far too many": ("/detokenize", {"tokens": [1] * 1_100_000}, 400),
    # What only admins may do.
    "a level of sleep that is none": ("/sleep", {"level": 3}, 400),
    "an admin body that is too large": ("/sleep", {"level": 1, "x": "a" * 70_000}, 413),
    "a nested admin body": ("/sleep", b'{"level":' + b"[" * 30_000, 400),
    "tags that are none": ("/wake_up", {"tags": ["all"]}, 400),
    "weights of nowhere": ("/update_weights", {"path": "nowhere"}, 400),
    "weights of no path": ("/update_weights", {"path": ""}, 400),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BODIES))
def test_a_hostile_body_gets_an_answer_of_its_own(name: str, attacked: BackgroundServer) -> None:
    path, body, wanted = BODIES[name]
    got = send(attacked.url, path, body)
    assert got.status in (wanted if isinstance(wanted, tuple) else (wanted,)), got.body[:500]
    if got.status != 200:
        assert got.error["message"]
        assert len(got.body) < 10_000, "an error does not repeat what it was sent"
    assert send(attacked.url, "/health").status == 200


HEADS: dict[str, tuple[bytes, int]] = {
    "no HTTP": (b"hello\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64) + b"\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /health\r\n\r\n", 200),
    "HTTP/9.9": (b"GET /health HTTP/9.9\r\n\r\n", 400),
    "no method": (b" /health HTTP/1.1\r\n\r\n", 400),
    "a method that is none": (b"STEAL /health HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "no address": (b"GET  HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "an address that leaves the root": (
        b"GET /../../etc/passwd HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
    "an address in percents": (
        b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
    "an address with a zero byte": (b"GET /health%00 HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
    "an address with a bare zero byte": (b"GET /he\x00 HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "an address that is too long": (
        b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n", 431),
    "a header that is too long": (
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 9000 + b"\r\n\r\n", 431),
    "a header name that is too long": (
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a" * 9000 + b": x\r\n\r\n", 431),
    "headers that are too many": (
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + b"a: b\r\n" * 2000 + b"\r\n", 431),
    "headers just below the limit": (
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * 8000 + b"\r\n\r\n", 200),
    "a header of no name": (b"GET /health HTTP/1.1\r\nhost: localhost\r\n: x\r\n\r\n", 400),
    "a header with a space": (b"GET /health HTTP/1.1\r\nhost: localhost\r\na b: x\r\n\r\n", 400),
    "a header with a zero byte": (
        b"GET /health HTTP/1.1\r\nhost: localhost\r\na: x\x00y\r\n\r\n", 400),
    "a header that goes on": (
        b"GET /health HTTP/1.1\r\nhost: localhost\r\na: x\r\n y\r\n\r\n", 400),
    "a length below zero": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n", 400),
    "a length that is a word": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: abc\r\n\r\n", 400),
    "a length with a sign": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: +4\r\n\r\n1234", 400),
    "a length beyond 64 bits": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: " + b"9" * 30
        + b"\r\n\r\n", 400),
    "a length beyond the limit": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\n",
        413),
    "two lengths": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n"
        b"content-length: 3\r\n\r\n{}x", 400),
    "a length beside chunks": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "an encoding that is none": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: x\r\n\r\n", 400),
    "chunked twice": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400),
    "a chunk of no size": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        b"zz\r\n\r\n", 400),
    "a chunk of a size below zero": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        b"-1\r\n\r\n", 400),
    "a chunk of a size beyond 64 bits": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
        b"fffffffffffffffff\r\n\r\n", 400),
    "a form": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\n"
        b"content-type: multipart/form-data; boundary=x\r\n\r\n--x-", 415),
    "a body of no type": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{}", 415),
    "a type as of a page": (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n"
        b"content-type: text/plain\r\n\r\n{}", 415),
    "a host of another name": (b"GET /health HTTP/1.1\r\nhost: evil.example\r\n\r\n", 403),
    "a host that begins alike": (
        b"GET /health HTTP/1.1\r\nhost: localhost.evil.example\r\n\r\n", 403),
    "a host with a user": (b"GET /health HTTP/1.1\r\nhost: localhost@evil.example\r\n\r\n", 403),
    "a host of nothing": (b"GET /health HTTP/1.1\r\nhost: \r\n\r\n", 403),
    "two hosts": (
        b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n", 403),
    "a host with bytes": (b"GET /health HTTP/1.1\r\nhost: \xff\xfe\r\n\r\n", 403),
    "an origin of a page": (
        b"POST /sleep HTTP/1.1\r\nhost: localhost\r\norigin: https://evil.example\r\n"
        b"content-length: 0\r\n\r\n", 403),
}  # fmt: skip


@pytest.mark.parametrize("name", list(HEADS))
def test_a_hostile_head_gets_an_answer_of_its_own(name: str, attacked: BackgroundServer) -> None:
    sent, wanted = HEADS[name]
    place = urlsplit(attacked.url)
    with socket.create_connection((str(place.hostname), place.port or 80), timeout=10) as line:
        line.sendall(sent)
        got = line.recv(4096)
    assert int(got.split(b" ", 2)[1]) == wanted, got[:300]
    assert send(attacked.url, "/health").status == 200


def test_what_is_sound_is_answered_behind_all_of_these(attacked: BackgroundServer) -> None:
    got: Got = send(attacked.url, CHAT, chat("hello", logit_bias={"5": -100, "0": 1.5}))
    assert got.status == 200, got.body
    assert got.json["choices"][0]["message"]["content"] == "ok"
