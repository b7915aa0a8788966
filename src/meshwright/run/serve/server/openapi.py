"""`/openapi.json`: what the server takes and answers, made from the bodies themselves."""

from typing import Any

import msgspec

from meshwright.run.serve.server.api_errors import ErrorResponse

SCHEMA_REF = "#/components/schemas/{name}"


class RouteSpec(msgspec.Struct, frozen=True):
    """What the page says of one endpoint."""

    method: str
    path: str
    summary: str
    response_type: type | None
    requires_key: bool = True
    error_statuses: tuple[int, ...] = ()
    """Those it may answer with besides 200."""
    request_type: type | None = None
    is_body_optional: bool = False


def build_openapi_document(endpoints: list[RouteSpec], version: str) -> dict[str, Any]:
    """Return the OpenAPI document of a server."""
    kinds: list[type] = [ErrorResponse]
    for told in endpoints:
        kinds += [kind for kind in (told.request_type, told.response_type) if kind is not None]
    schemas, components = msgspec.json.schema_components(
        list(dict.fromkeys(kinds)), ref_template=SCHEMA_REF
    )
    for schema in components.values():
        if schema.get("additionalProperties") is False:
            # An unknown field may be there, where it is null (`drop_unknown_nulls`).
            schema["additionalProperties"] = {"type": "null"}
    refs = dict(zip(dict.fromkeys(kinds), schemas, strict=True))
    paths: dict[str, Any] = {}
    for told in endpoints:
        paths.setdefault(told.path, {})[told.method.lower()] = _operation(told, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Meshwright", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(told: RouteSpec, refs: dict[type, Any]) -> dict[str, Any]:
    fault = {"application/json": {"schema": refs[ErrorResponse]}}
    answers: dict[str, Any] = {
        str(status): {"description": "An error", "content": fault} for status in told.error_statuses
    }
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if told.response_type is not None:
        content = {"application/json": {"schema": refs[told.response_type]}}
    if told.request_type is not None and hasattr(told.request_type, "stream"):
        content["text/event-stream"] = {}
    answers["200"] = {"description": "The answer", "content": content}
    operation: dict[str, Any] = {
        "summary": told.summary,
        "operationId": told.path.strip("/").replace("/", "_") or "root",
        "responses": answers,
    }
    if told.request_type is not None:
        operation["requestBody"] = {
            "required": not told.is_body_optional,
            "content": {"application/json": {"schema": refs[told.request_type]}},
        }
    if told.requires_key:
        operation["security"] = [{"key": []}, {}]
    return operation
