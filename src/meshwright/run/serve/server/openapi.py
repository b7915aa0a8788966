"""`/openapi.json`: what the server takes and answers, made from the bodies themselves."""

from typing import Any

import msgspec

from meshwright.run.serve.server.faults import FaultBody

TEMPLATE = "#/components/schemas/{name}"


class Told(msgspec.Struct, frozen=True):
    """What the page says of one endpoint."""

    method: str
    path: str
    summary: str
    reply: type | None
    guarded: bool = True
    statuses: tuple[int, ...] = ()
    """Those it may answer with besides 200."""
    body: type | None = None
    body_may_lack: bool = False


def document(endpoints: list[Told], version: str) -> dict[str, Any]:
    """Return the OpenAPI document of a server."""
    kinds: list[type] = [FaultBody]
    for told in endpoints:
        kinds += [kind for kind in (told.body, told.reply) if kind is not None]
    schemas, components = msgspec.json.schema_components(
        list(dict.fromkeys(kinds)), ref_template=TEMPLATE
    )
    for schema in components.values():
        if schema.get("additionalProperties") is False:
            # A field that is not known may be there, where it asks for nothing (`nulls`).
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


def _operation(told: Told, refs: dict[type, Any]) -> dict[str, Any]:
    fault = {"application/json": {"schema": refs[FaultBody]}}
    answers: dict[str, Any] = {
        str(status): {"description": "An error", "content": fault} for status in told.statuses
    }
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if told.reply is not None:
        content = {"application/json": {"schema": refs[told.reply]}}
    if told.body is not None and hasattr(told.body, "stream"):
        content["text/event-stream"] = {}
    answers["200"] = {"description": "The answer", "content": content}
    operation: dict[str, Any] = {
        "summary": told.summary,
        "operationId": told.path.strip("/").replace("/", "_") or "root",
        "responses": answers,
    }
    if told.body is not None:
        operation["requestBody"] = {
            "required": not told.body_may_lack,
            "content": {"application/json": {"schema": refs[told.body]}},
        }
    if told.guarded:
        operation["security"] = [{"key": []}, {}]
    return operation
