"""The worst requests that are known of each kind, up to the limit of a body.

Each is one request of one client. `attacks` makes them for a vocabulary and a context; what a
server should do with them is in `statuses`: most are refused, some are answered.
"""

import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

CHAT, TEXT, EMBED = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
BODY_BYTES = 16 * 2**20
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}"
    "{% elif message.content == 'repeat' %}{{ 'a' * 10**10 }}"
    "{% elif message.content == 'center' %}{{ 'a'|center(10**10) }}"
    "{% elif message.content == 'double' %}{% set ns = namespace(text='a') %}"
    "{% for a in range(60) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}"
    "{% else %}{{ message.role }}: {{ message.content }}\n{% endif %}{% endfor %}"
)
"""A chat template that is itself hostile where a message says so."""


class Attack(NamedTuple):
    """One request, and the statuses that are right for it."""

    name: str
    path: str
    body: Callable[[], bytes]
    """Makes it: all of them together would fill the memory."""
    statuses: tuple[int, ...] = (400,)
    head: bytes = b"Content-Type: application/json\r\n"
    chunk_bytes: int = 0
    """Bytes of a chunk where the body is sent in chunks."""

    def pieces(self) -> Iterator[bytes]:
        """Yield the request as it is sent."""
        head = f"POST {self.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
        body = self.body()
        if not self.chunk_bytes:
            yield head + self.head + b"Content-Length: %d\r\n\r\n" % len(body)
            yield body
            return
        yield head + self.head + b"Transfer-Encoding: chunked\r\n\r\n"
        step = self.chunk_bytes
        parts = (body[at : at + step] for at in range(0, len(body), step))
        yield b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def attacks(*, vocab_size: int, max_model_len: int) -> list[Attack]:
    """Return the requests, for a server with a model of such a size."""
    return [
        *_prompts(vocab_size, max_model_len),
        *_sampling(vocab_size),
        *_grammars(),
        *_tools(),
        *_templates(),
        *_json(),
        *_framings(),
    ]


def _body(**fields: Any) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode()


def _chat(content: Any = "hi", **fields: Any) -> bytes:
    return _body(messages=[{"role": "user", "content": content}], **{"max_tokens": 4, **fields})


def _prompts(vocab_size: int, max_model_len: int) -> list[Attack]:
    size = BODY_BYTES - 2**16
    draw = random.Random(7)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=7)) for _ in range(2000)]
    prose = " ".join(draw.choices(words, k=size // 8))
    tokens = [draw.randrange(vocab_size) for _ in range(size // 8)]
    full = [[number % vocab_size for number in range(max_model_len - 5)]] * 8
    many = [{"role": "user", "content": "a"}] * (size // 34)
    return [
        Attack("chat of short words", CHAT, lambda: _chat("a " * (size // 2))),
        Attack("chat of random words", CHAT, lambda: _chat(prose)),
        Attack("chat of one long word", CHAT, lambda: _chat("a" * size)),
        Attack("chat of spaces", CHAT, lambda: _chat(" " * size)),
        Attack("chat of emoji", CHAT, lambda: _chat("🙂" * (size // 4))),
        Attack("chat of control characters", CHAT, lambda: _chat("\x01" * (size // 6))),
        Attack("chat of many messages", CHAT, lambda: _body(messages=many), (400, 504)),
        Attack(
            "chat of many parts",
            CHAT,
            lambda: _chat([{"type": "text", "text": "a"}] * (size // 34)),
            (400, 504),
        ),
        Attack("prompt of random words", TEXT, lambda: _body(prompt=prose)),
        Attack(
            "prompts of random words",
            TEXT,
            lambda: _body(prompt=[prose[at::256] for at in range(256)]),
        ),
        Attack("prompt of tokens", TEXT, lambda: _body(prompt=tokens)),
        Attack("prompts that just fit", TEXT, lambda: _body(prompt=full, max_tokens=1), (200, 400)),
        Attack("embedding of random words", EMBED, lambda: _body(input=prose)),
        Attack("tokenize random words", "/tokenize", lambda: _body(prompt=prose)),
        Attack(
            "tokenize a chat",
            "/tokenize",
            lambda: _body(messages=[{"role": "user", "content": prose}]),
        ),
        Attack(
            "tokenize with strings",
            "/tokenize",
            lambda: _body(prompt=prose[: 2**21], return_token_strs=True),
            (200,),
        ),
        Attack("detokenize", "/detokenize", lambda: _body(tokens=tokens)),
        Attack(
            "echo with log-probabilities",
            TEXT,
            lambda: _body(prompt=full[0][:6500], max_tokens=1, echo=True, logprobs=20),
            (200, 400),
        ),
    ]


def _sampling(vocab_size: int) -> list[Attack]:
    orbit, key = [], 1
    for _ in range(120_000):  # where a dict looks next, in tables of 2**18 entries
        key = (5 * key + 1) % 2**18
        orbit.append(key)
    bias = {str(token % vocab_size): 1.0 for token in range(1024)}
    stops = ["a" * 900 + chr(97 + at) * 99 for at in range(16)]
    return [
        Attack(
            "logit_bias that collides",
            TEXT,
            lambda: _body(prompt="a", logit_bias={str(key): 1 for key in orbit}),
        ),
        Attack(
            "logit_bias of the most entries",
            TEXT,
            lambda: _body(prompt="a", logit_bias=bias, n=16, max_tokens=32, temperature=0),
            (200, 400),
        ),
        Attack("stop_token_ids", TEXT, lambda: _body(prompt="a", stop_token_ids=orbit * 12)),
        Attack(
            "stop strings",
            TEXT,
            lambda: _body(prompt="aaaa", stop=stops, n=16, max_tokens=64, temperature=0),
            (200, 400),
        ),
        Attack("many stop strings", TEXT, lambda: _body(prompt="a", stop=["ab"] * 2_700_000)),
        Attack(
            "n and log-probabilities",
            CHAT,
            lambda: _chat(n=16, logprobs=True, top_logprobs=20, max_tokens=64, temperature=0),
            (200, 400),
        ),
    ]


def _grammars() -> list[Attack]:
    def bound(**form: Any) -> bytes:
        return _chat(structured_outputs=form)

    def schema(value: Any) -> bytes:
        form = {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}
        return _chat(response_format=form)

    wide = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(7000)}}
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(90):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    lengths = {"type": "string", "minLength": 0, "maxLength": 10**9}
    items = {"type": "array", "items": lengths, "minItems": 10**6, "maxItems": 10**9}
    branches = {"anyOf": [{"type": "string", "pattern": f"^[a-z]{{{n}}}$"} for n in range(1, 3000)]}
    allowed = (200, 400)
    return [
        Attack("schema of the largest size", CHAT, lambda: schema({"enum": ["a" * 20] * 690_000})),
        Attack("schema with many properties", CHAT, lambda: schema(wide), allowed),
        Attack("schema that nests", CHAT, lambda: schema(nested), allowed),
        Attack("schema with huge bounds", CHAT, lambda: schema(items), allowed),
        Attack("schema with many patterns", CHAT, lambda: schema(branches), allowed),
        Attack(
            "schema with a huge enum",
            CHAT,
            lambda: schema({"enum": [f"word{n}" for n in range(20_000)]}),
            allowed,
        ),
        Attack(
            "regex that repeats", CHAT, lambda: bound(regex="((a{1,900}){1,900}){1,900}"), allowed
        ),
        Attack("regex that is long", CHAT, lambda: bound(regex="(a|b)?" * 40_000), allowed),
        Attack("regex of classes", CHAT, lambda: bound(regex=r"[\p{L}\d]{1,100}" * 2000), allowed),
        Attack(
            "grammar that is long",
            CHAT,
            lambda: bound(grammar="start: " + " | ".join(f'"w{n}"' for n in range(22_000))),
            allowed,
        ),
        Attack(
            "grammar that is ambiguous",
            CHAT,
            lambda: bound(grammar='start: a a a a a a a a\na: "a"* | a a | ""'),
            allowed,
        ),
        Attack(
            "choices", CHAT, lambda: bound(choice=["a" * 50 + str(n) for n in range(4000)]), allowed
        ),
    ]


def _tools() -> list[Attack]:
    def tool(name: str, properties: int) -> dict[str, Any]:
        fields = {f"p{n}": {"type": "string", "description": "x" * 20} for n in range(properties)}
        parameters = {"type": "object", "properties": fields}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    call = {"function": {"name": "f", "arguments": "[" * 2_000_000}}
    huge = {"function": {"name": "f", "arguments": json.dumps({"a": [0] * 4_000_000})}}
    return [
        Attack(
            "tools of the largest size",
            CHAT,
            lambda: _chat(tools=[tool(f"f{n}", 20) for n in range(8000)]),
        ),
        Attack("one tool of the largest size", CHAT, lambda: _chat(tools=[tool("f", 200_000)])),
        Attack(
            "a demanded call among many tools",
            CHAT,
            lambda: _chat(tools=[tool(f"f{n}", 5) for n in range(500)], tool_choice="required"),
            (200, 400),
        ),
        Attack(
            "arguments that nest",
            CHAT,
            lambda: _body(messages=[{"role": "assistant", "tool_calls": [call]}]),
        ),
        Attack(
            "arguments of the largest size",
            CHAT,
            lambda: _body(messages=[{"role": "assistant", "tool_calls": [huge]}], max_tokens=4),
            (200, 400),
        ),
    ]


def _templates() -> list[Attack]:
    values = {f"name{n}": n for n in range(700_000)}
    return [
        *(
            Attack(f"a template that would {name}", CHAT, partial(_chat, name))
            for name in ("loop", "repeat", "center", "double")
        ),
        Attack("template values", CHAT, lambda: _chat(chat_template_kwargs=values), (200, 400)),
    ]


def _json() -> list[Attack]:
    half = BODY_BYTES // 2 - 2**10
    return [
        Attack("brackets", TEXT, lambda: b"[" * (2 * half)),
        Attack("objects that nest", TEXT, lambda: b'{"prompt":' + b'{"a":' * (half // 3)),
        Attack(
            "metadata that nests",
            TEXT,
            lambda: b'{"prompt":"a","metadata":{"a":' + b"[" * half + b"]" * half + b"}}",
        ),
        Attack(
            "metadata of lists",
            TEXT,
            lambda: b'{"prompt":"a","metadata":{"a":[' + b"[]," * (half // 2) + b"[]]}}",
            (200, 400),
        ),
        Attack(
            "metadata of names",
            TEXT,
            lambda: _body(prompt="a", metadata={f"name{n}": n for n in range(600_000)}),
            (200, 400),
        ),
        Attack(
            "a number of many digits", TEXT, lambda: b'{"prompt":"a","seed":' + b"1" * half + b"}"
        ),
        Attack(
            "a fraction of many digits",
            TEXT,
            lambda: b'{"prompt":"a","temperature":0.' + b"1" * half + b"}",
            (200, 400),
        ),
        Attack("an unknown field with a long name", TEXT, lambda: b'{"' + b"a" * half + b'":1}'),
        Attack(
            "nulls that are unknown",
            TEXT,
            lambda: _body(prompt="a", **{f"name{n}": None for n in range(500_000)}),
            (200, 400),
        ),
        Attack("a text that ends nowhere", TEXT, lambda: b'{"prompt":"' + b"a" * half),
        Attack("bytes that are no UTF-8", TEXT, lambda: b'{"prompt":"' + b"\xff" * half + b'"}'),
        Attack("half surrogates", TEXT, lambda: b'{"prompt":"' + rb"\ud800" * (half // 3) + b'"}'),
    ]


def _framings() -> list[Attack]:
    body = _body(prompt="a", max_tokens=1)
    filled = body[:-1] + b" " * (2**20) + b"}"
    many = b"Content-Type: application/json\r\n" + b"a: b\r\n" * 10_000
    part = b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\na\r\n'
    form = b"Content-Type: multipart/form-data; boundary=x\r\n"
    return [
        Attack("headers", TEXT, lambda: body, (200,), many),
        Attack("headers beyond the limit", TEXT, lambda: body, (431,), many * 4),
        Attack("chunks of one byte", TEXT, lambda: filled, (200, 400, 408), chunk_bytes=1),
        Attack("chunks of 64 bytes", TEXT, lambda: filled * 8, (400, 408), chunk_bytes=64),
        Attack("multipart", TEXT, lambda: part * (BODY_BYTES // len(part) - 9), (415,), form),
        Attack("a body beyond the limit", TEXT, lambda: b"[" * (BODY_BYTES + 1), (413,)),
    ]
