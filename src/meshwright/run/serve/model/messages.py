"""`plain_message`: a message as chat templates read it, whoever sent it: a client, or a data set.

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


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with text for content, objects for arguments, and nothing that is null.

    Raises `InputError`, whose problem is located within the message.
    """
    plain = {name: value for name, value in message.items() if value is not None}
    refusal = plain.pop("refusal", None)
    plain["content"] = _text(plain.get("content"), refusal, str(message.get("role")))
    thoughts = plain.pop("reasoning", None)
    if thoughts is not None:
        plain.setdefault("reasoning_content", thoughts)
    if calls := plain.pop("tool_calls", None):
        plain["tool_calls"] = [_call(call, number) for number, call in enumerate(calls)]
    return plain


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
        text = part.get(kind) if isinstance(part, Mapping) else None
        if kind not in {"text", "refusal"} or not isinstance(text, str):
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
    named = {"id": call["id"]} if "id" in call else {}
    return {**named, "type": "function", "function": {**function, "arguments": arguments}}


def _fault(where: str, what: str, fix: str) -> InputError:
    return InputError([Problem(where, what, fix)])
