"""The guide to serving tells the truth."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright.run.serve.server import BackgroundServer
from meshwright.run.serve.server.protocol.request_schema import (
    ChatCompletionRequest,
    CompletionRequest,
)
from meshwright.run.serve.server.server_config import ServerConfig
from tests.run.serve.server.wire import send

GUIDE = Path(__file__).resolve().parents[4] / "docs" / "guide" / "serve.md"


@pytest.fixture(scope="module")
def page() -> str:
    return GUIDE.read_text(encoding="utf-8")


def _part(page: str, title: str) -> str:
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_field_is_in_the_table_and_no_other(page: str) -> None:
    rows = [row.split("|") for row in _part(page, "Fields of a request").splitlines() if "|" in row]
    told = {name for row in rows[2:] for name in re.findall(r"`(\w+)`", row[1])}
    fields = {
        field.name
        for kind in (ChatCompletionRequest, CompletionRequest)
        for field in msgspec.structs.fields(kind)
    }
    assert told | {"best_of"} == fields


def test_every_endpoint_is_in_the_table(page: str, served: BackgroundServer) -> None:
    told = set(re.findall(r"(GET|POST) (/[\w/.]+)", _part(page, "Endpoints")))
    paths = send(served.url, "/openapi.json").json["paths"]
    made = {(verb.upper(), path) for path, verbs in paths.items() for verb in verbs}
    assert told == made | {("GET", "/openapi.json")}


def test_limits_are_those_of_the_settings(page: str) -> None:
    part = _part(page, "Limits")
    plain = ServerConfig(model="m")
    assert f"{plain.max_body_bytes >> 20} MiB, sent within {plain.body_timeout_s:g} s" in part
    assert f"{plain.max_header_bytes >> 10} KiB, sent within {plain.header_timeout_s:g} s" in part
    for name in (
        "max_prompts_per_request",
        "max_n",
        "max_queued_requests",
        "request_timeout_s",
        "shutdown_timeout_s",
        "write_timeout_s",
    ):
        assert re.search(rf"\| {getattr(plain, name):g}( s)? \| `{name}`", part), name


def test_the_example_runs(page: str, served: BackgroundServer) -> None:
    pytest.importorskip("openai", reason="the official client is a part of the dev setup")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code.replace("http://127.0.0.1:8000", served.url), str(GUIDE), "exec"), names)
    names["client"].close()
    assert names["text"] == ">user: Hello!"
