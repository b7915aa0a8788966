"""Whose names a server answers under: its own, where only this machine can reach it."""

import pytest

from tests.run.serve.server.serving import HELLO, TEXT, serving
from tests.run.serve.server.wire import send


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost:8000", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8000",
     "localhost."],
)  # fmt: skip
def test_a_server_on_loopback_answers_under_its_own_names(host: str) -> None:
    with serving() as (served, _):
        assert send(served.url, TEXT, HELLO, headers={"host": host}).status == 200


@pytest.mark.parametrize("path", [TEXT, "/health", "/metrics", "/v1/models", "/nowhere"])
def test_a_page_that_rebinds_its_name_reads_nothing(path: str) -> None:
    with serving() as (served, engine):
        got = send(served.url, path, HELLO if path == TEXT else None, headers={"host": "evil.io"})
        assert (got.status, got.error["code"]) == (403, "host_not_allowed")
        assert "--allowed-hosts" in got.error["message"]
        assert not engine.asked


def test_hosts_that_are_allowed_are_answered_beside_the_own_ones() -> None:
    with serving(allowed_hosts=("llm.example.com",)) as (served, _):
        for host in ("llm.example.com", "LLM.example.com:443", "localhost"):
            assert send(served.url, "/health", headers={"host": host}).status == 200
        assert send(served.url, "/health", headers={"host": "example.com"}).status == 403
    with serving(allowed_hosts=("*",)) as (served, _):
        assert send(served.url, "/health", headers={"host": "any.example"}).status == 200
