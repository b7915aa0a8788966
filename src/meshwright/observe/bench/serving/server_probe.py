"""Who answers: the model and software of a server, and how it counts the tokens of a text."""

from asyncio import gather
from collections import Counter
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.observe.bench.serving.openai_protocol import Api, extract_error_message
from meshwright.observe.bench.serving.random_prompts import COMMON_WORDS

if TYPE_CHECKING:
    import aiohttp

PROBE_TIMEOUT_S = 30.0
"""How long a server may take to say what it is."""
_REPEATS = 9
_AT_ONCE = 8
MIN_WORDS = 16


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Who was asked."""

    url: str
    model: str
    software: str = ""
    """Name and version, as far as the server tells."""
    max_model_len: int | None = None
    """Tokens of a prompt with its answer."""


class TokenWords(msgspec.Struct, frozen=True, kw_only=True):
    """How texts of a wanted number of tokens are made."""

    words: tuple[str, ...]
    separator: str = " "
    extra_tokens: int = 0
    """Tokens that the server adds to every text: a template's, a begin of text."""
    verified: bool = True
    """Whether the server's tokenizer was asked; else a word is taken for a token."""


def parse_base_url(url: str) -> str:
    """Return the root of a server's address, without the version that many are given with."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        fix = "give it like http://127.0.0.1:8000"
        raise InputError([Problem("URL", f"{url!r} is no address of a server", fix)])
    if parts.username or parts.password:
        fix = "put the key into an environment variable and name that with --api-key-env"
        raise InputError([Problem("URL", "holds a name or password, which results keep", fix)])
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/").removesuffix("/v1")


async def probe_server(
    session: "aiohttp.ClientSession", base: str, model: str | None
) -> ServerInfo:
    """Ask a server what it serves; raise where none answers or the model is not among it."""
    status, told = await _get(session, f"{base}/v1/models")
    if status in (401, 403):
        fix = "name the variable that holds the key with --api-key-env"
        raise InputError(
            [Problem(base, f"refuses us with {status}: {extract_error_message(told)}", fix)]
        )
    rows = told.get("data") if isinstance(told, dict) else None
    found = {row["id"]: row for row in rows or () if isinstance(row, dict) and "id" in row}
    if model is None:
        if not found:
            what = f"answers /v1/models with {status} and no model"
            raise InputError([Problem(base, what, "name the model with --model")])
        model = next(iter(found))
    elif found and model not in found:
        fix = f"use one of {', '.join(found)}"
        raise InputError([Problem("--model", f"{base} does not serve {model!r}", fix)])
    row = found.get(model, {})
    longest = row.get("max_model_len")
    return ServerInfo(
        url=base,
        model=model,
        software=await _software(session, base, str(row.get("owned_by") or "")),
        max_model_len=longest if isinstance(longest, int) else None,
    )


async def _software(session: "aiohttp.ClientSession", base: str, owner: str) -> str:
    for path in ("/version", "/get_server_info", "/server_info"):
        status, told = await _get(session, base + path)
        if status == 200 and isinstance(told, dict) and isinstance(told.get("version"), str):
            return f"{owner} {told['version']}".strip()
    return owner


async def find_single_token_words(
    session: "aiohttp.ClientSession", server: ServerInfo, api: Api
) -> TokenWords:
    """Find words that are one token each, and what the server adds to a text, through /tokenize."""

    async def count(text: str) -> int | None:
        body: dict[str, Any] = {"model": server.model, "prompt": text}
        if api == "chat":
            message = {"role": "user", "content": text}
            body = {"model": server.model, "messages": [message], "add_generation_prompt": True}
        status, told = await _post(session, f"{server.url}/tokenize", body)
        found = told.get("count") if status == 200 and isinstance(told, dict) else None
        return found if isinstance(found, int) else None

    async def both(word: str) -> tuple[int | None, int | None]:
        first = COMMON_WORDS[0]
        return await count(f"{first} {word}"), await count(f"{first}{f' {word}' * _REPEATS}")

    single, added = list[str](), Counter[int]()
    for start in range(0, len(COMMON_WORDS), _AT_ONCE):
        some = COMMON_WORDS[start : start + _AT_ONCE]
        for word, (once, often) in zip(some, await gather(*map(both, some)), strict=True):
            if once is None or often is None:
                return TokenWords(words=COMMON_WORDS, verified=False)
            if often - once == _REPEATS - 1:
                single.append(word)
                added[once - 2] += 1
    if len(single) >= MIN_WORDS:
        return TokenWords(words=tuple(single), extra_tokens=added.most_common(1)[0][0])
    # A tokenizer of bytes has no words, but each letter is a token.
    one, all_of_them = await count(ascii_lowercase[0]), await count(ascii_lowercase)
    if one is not None and all_of_them == one + len(ascii_lowercase) - 1:
        return TokenWords(words=tuple(ascii_lowercase), separator="", extra_tokens=one - 1)
    return TokenWords(words=COMMON_WORDS, verified=False)


async def _get(session: "aiohttp.ClientSession", url: str) -> tuple[int, Any]:
    return await _asked(session, "GET", url, None)


async def _post(session: "aiohttp.ClientSession", url: str, body: object) -> tuple[int, Any]:
    return await _asked(session, "POST", url, body)


async def _asked(
    session: "aiohttp.ClientSession", method: str, url: str, body: object
) -> tuple[int, Any]:
    """Return a reply's status and its JSON, or its text where it is none."""
    import aiohttp

    limit = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
    try:
        async with session.request(method, url, json=body, timeout=limit) as reply:
            data = await reply.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        said = str(error) or f"no answer in {PROBE_TIMEOUT_S:.0f} s"
        hint = "start the server first, or check the address"
        raise MissingDependency(f"no server at {url}: {said}", hint) from None
    try:
        return reply.status, msgspec.json.decode(data)
    except msgspec.DecodeError:
        return reply.status, data.decode(errors="replace")[:200]
