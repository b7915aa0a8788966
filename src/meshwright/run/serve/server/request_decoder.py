"""`decode_body`: JSON to the struct of a request, or the error that says what is wrong with it."""

from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from meshwright.run.serve.server.api_errors import ApiError, invalid_body

_NULL = b"null"
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])
BodyT = TypeVar("BodyT", bound=msgspec.Struct)


def decode_body(data: bytes, body: type[BodyT]) -> BodyT:
    """Return the fields of a body.

    Raises:
        ApiError: Where it is not JSON, has unknown fields, or has fields of other types.
    """
    try:
        try:
            return msgspec.json.decode(data, type=body)
        except msgspec.ValidationError as error:
            if "unknown field" not in str(error):
                raise
            return msgspec.json.decode(drop_unknown_nulls(data, body), type=body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid_body(error) from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply", code="invalid_json") from None


def drop_unknown_nulls(data: bytes, body: type) -> bytes:
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
