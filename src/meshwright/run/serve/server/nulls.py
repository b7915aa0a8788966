"""Fields that are null and not known: clients mean "not given" by them, and the server takes that.

Libraries write every field that they know, also those nobody set, and so send null for fields of
other servers. A field that is not known and has a value is still refused: something was asked for.
"""

from typing import Any

import msgspec
from msgspec import inspect

_NULL = b"null"
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])


def without_nulls(data: bytes, body: type) -> bytes:
    """Return JSON without the null fields that a body does not know, at any depth of it.

    What is no part of a known field's type, such as the schema of a tool, stays as it is written.
    """
    return bytes(_stripped(msgspec.Raw(data), inspect.type_info(body)))


def _stripped(raw: msgspec.Raw, kind: inspect.Type) -> msgspec.Raw:
    first = bytes(raw).lstrip()[:1]
    for each in kind.types if isinstance(kind, inspect.UnionType) else (kind,):
        if isinstance(each, inspect.StructType) and first == b"{":
            return _struct(raw, each)
        if isinstance(each, inspect.ListType) and first == b"[":
            return _written([_stripped(item, each.item_type) for item in _items.decode(raw)])
    return raw


def _struct(raw: msgspec.Raw, kind: inspect.StructType) -> msgspec.Raw:
    known = {field.encode_name: field.type for field in kind.fields}
    return _written(
        {
            name: _stripped(value, known[name]) if name in known else value
            for name, value in _fields.decode(raw).items()
            if name in known or bytes(value).strip() != _NULL
        }
    )


def _written(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
