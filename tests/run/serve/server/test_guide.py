"""The guide to serving tells the truth."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright.run.serve.server import Served
from meshwright.run.serve.server.bodies import ChatBody, CompletionBody
from meshwright.run.serve.server.settings import ServerSettings
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
        field.name for kind in (ChatBody, CompletionBody) for field in msgspec.structs.fields(kind)
    }
    assert told | {"best_of"} == fields


def test_every_endpoint_is_in_the_table(page: str, served: Served) -> None:
    told = set(re.findall(r"(GET|POST) (/[\w/.]+)", _part(page, "Endpoints")))
    paths = send(served.url, "/openapi.json").json["paths"]
    made = {(verb.upper(), path) for path, verbs in paths.items() for verb in verbs}
    assert told == made | {("GET", "/openapi.json")}


def test_limits_are_those_of_the_settings(page: str) -> None:
    part = _part(page, "Limits")
    plain = ServerSettings(model="m")
    assert f"{plain.body_bytes >> 20} MiB, sent within {plain.body_s:g} s" in part
    assert f"{plain.head_bytes >> 10} KiB, sent within {plain.head_s:g} s" in part
    for name in ("prompts", "choices", "waiting", "request_s", "drain_s", "unread_s"):
        assert re.search(rf"\| {getattr(plain, name):g}( s)? \| `{name}`", part), name


def test_the_example_runs(page: str, served: Served) -> None:
    pytest.importorskip("openai", reason="the official client is a part of the dev setup")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code.replace("http://127.0.0.1:8000", served.url), str(GUIDE), "exec"), names)
    names["client"].close()
    assert names["text"] == ">user: Hello!"
