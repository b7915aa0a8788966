"""`normalize_message`: a chat message as chat templates read it, from a client or a data set.

Templates of published models expect text for content, and objects for the arguments of calls, where
OpenAI's API sends lists of parts and JSON in a string. What is served and what is trained pass
through here alike, so that a model is asked as it was taught.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from meshwright.errors import InputError, Problem

_SPOKEN = frozenset({"user", "system", "developer"})
"""Roles that have nothing to say but their content."""


def normalize_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with text for content, objects for arguments, and nothing that is null.

    Raises `InputError`, whose problem is located within the message.
    """
    plain = {name: value for name, value in message.items() if value is not None}
    refusal = plain.pop("refusal", None)
    plain["content"] = _text(plain.get("content"), refusal, str(message.get("role")))
    thoughts = plain.pop("reasoning", None)
    if thoughts is not None:
        plain.setdefault("reasoning_content", thoughts)
    calls = plain.pop("tool_calls", None)
    if calls is not None and not isinstance(calls, list | tuple):
        raise _fault("tool_calls", "is no list", "give a list of calls")
    if calls:
        plain["tool_calls"] = [_call(call, number) for number, call in enumerate(calls)]
    return plain


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation as templates read it; a problem names its message."""
    found = []
    for number, message in enumerate(messages):
        try:
            found.append(normalize_message(message))
        except InputError as error:
            where = [each._replace(where=_within(number, each.where)) for each in error.problems]
            raise InputError(where) from None
    return found


def _within(number: int, where: str) -> str:
    return f"messages[{number}].{where}" if where else f"messages[{number}]"


def _text(content: object, refusal: object, role: str) -> str:
    if content is None and role in _SPOKEN:
        raise _fault("", "has no `content`", "say something")
    if content is None:
        return str(refusal or "")
    if isinstance(content, str):
        return content or str(refusal or "")
    if not isinstance(content, Sequence):
        raise _fault("content", "is no text", "give a string, or a list of parts")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        known = isinstance(part, Mapping) and kind in ("text", "refusal")
        text = part.get(kind) if known else None
        if not isinstance(text, str):
            what = f"is a part of type {kind!r}: only text is taken"
            raise _fault(f"content[{number}]", what, "leave it out")
        texts.append(text)
    return "\n".join(texts)


def _call(call: object, number: int) -> dict[str, Any]:
    where = f"tool_calls[{number}].function"
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise _fault(where, "is missing", "give its name and arguments")
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except (msgspec.DecodeError, RecursionError):
            raise _fault(f"{where}.arguments", "is not JSON", "write an object") from None
    if not isinstance(arguments, Mapping):
        raise _fault(f"{where}.arguments", "is no object", "name each argument with its value")
    named = {"id": call["id"]} if call.get("id") is not None else {}
    about = {name: value for name, value in function.items() if value is not None}
    return {**named, "type": "function", "function": {**about, "arguments": arguments}}


def _fault(where: str, what: str, fix: str) -> InputError:
    return InputError([Problem(where, what, fix)])
