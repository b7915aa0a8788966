"""slurmrestd over HTTP and a unix socket: versions, tokens, answers that fail."""

import json
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.fleet.sources.slurm import rest_source
from meshwright.fleet.sources.source import Secret, SourceOptions
from meshwright.fleet.sources.source_registry import open_source

JOB = {
    "job_id": 7, "cluster": "c", "nodes": "n1", "state": {"current": ["COMPLETED"]},
    "time": {"submission": 1.5e9 + 10, "start": 1.5e9 + 20, "end": 1.5e9 + 30}, "tres": {},
    "restart_cnt": 1,
}  # fmt: skip
NODE = {"name": "n1", "state": ["IDLE"], "gres": "gpu:h100:8", "boot_time": 5, "partitions": ["p"]}


DOCUMENTS: dict[str, Any] = {
    "/openapi/v3": {
        "paths": {
            "/slurm/v0.0.39/jobs": {},
            "/slurm/v0.0.41/jobs/": {},
            "/slurm/v0.0.41/nodes/": {},
            "/slurmdb/v0.0.41/jobs/": {"get": {"parameters": [{"name": "show_duplicates"}]}},
            "/slurmdb/v0.0.40/jobs/": {},
        }
    },
    "/slurmdb/v0.0.41/jobs": {"jobs": [JOB], "meta": {"slurm": {"cluster": "c"}}},
    "/slurm/v0.0.41/jobs": {"jobs": []},
    "/slurm/v0.0.41/nodes": {"nodes": [NODE]},
}


class Handler(BaseHTTPRequestHandler):
    asked: list[tuple[str, str | None]]
    failures: int

    def do_GET(self) -> None:
        kind = type(self)
        kind.asked.append((self.path, self.headers.get("X-SLURM-USER-TOKEN")))
        if kind.failures:
            kind.failures -= 1
            self.reply(502, b"<html>bad gateway</html>")
        elif self.headers.get("X-SLURM-USER-TOKEN") == "worn-out-token":
            self.reply(401, b'{"errors": [{"description": "Authentication failure"}]}')
        else:
            found = DOCUMENTS.get(self.path.partition("?")[0])
            self.reply(200 if found else 404, json.dumps(found or {}).encode())

    def reply(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass

    def address_string(self) -> str:
        return ""


class UnixServer(socketserver.UnixStreamServer):
    pass


@pytest.fixture(params=["http", "unix"])
def server(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, type[Handler]]]:
    monkeypatch.setattr(rest_source, "_WAITS_S", (0.0, 0.0))
    kind = type("Recorder", (Handler,), {"asked": [], "failures": 0})
    running: socketserver.BaseServer
    if request.param == "http":
        web = HTTPServer(("127.0.0.1", 0), kind)
        running, where = web, f"slurm+http://127.0.0.1:{web.server_address[1]}"
    else:
        path = tmp_path / "r.sock"
        running, where = UnixServer(str(path), kind), str(path)
    thread = threading.Thread(target=running.serve_forever, args=(0.02,))
    thread.start()
    yield where, kind
    running.shutdown()
    thread.join()
    running.server_close()


def test_the_newest_version_is_asked(server: tuple[str, type[Handler]]) -> None:
    where, handler = server
    source = open_source(where, SourceOptions(token=Secret("sesame"), since_s=1.5e9))
    batches = list(source.read_batches())
    rows = {batch.table: batch.rows.to_pylist() for batch in batches}
    assert [(job["job"], job["attempt"], job["state"]) for job in rows["jobs"]] == [
        ("7", 1, "completed")
    ]
    assert [(node["node"], node["cluster"], node["gpus"]) for node in rows["nodes"]] == [
        ("n1", "c", 8)
    ]
    paths = [path for path, _ in handler.asked]
    assert paths[1] == "/slurmdb/v0.0.41/jobs?start_time=1500000000&show_duplicates=true"
    assert {token for _, token in handler.asked} == {"sesame"}
    told = (source.name, *(batch.cursor or "" for batch in batches), repr(source.__dict__))
    assert not any("sesame" in text for text in told)


def test_going_on_asks_for_an_overlap(server: tuple[str, type[Handler]]) -> None:
    where, handler = server
    source = open_source(where, SourceOptions(kind_options={"overlap_s": "100"}))
    list(source.read_batches(json.dumps({"until_s": 1.5e9})))
    assert handler.asked[1][0].startswith("/slurmdb/v0.0.41/jobs?start_time=1499999900&")


def test_an_answer_that_fails_is_asked_for_again_and_told(
    server: tuple[str, type[Handler]],
) -> None:
    where, handler = server
    handler.failures = 1
    notes = [
        note for batch in open_source(where, SourceOptions()).read_batches() for note in batch.notes
    ]
    assert any("asked again 1 times" in note for note in notes)


def test_a_stale_token_is_named_but_not_shown(server: tuple[str, type[Handler]]) -> None:
    where, _ = server
    with pytest.raises(InputError, match="SLURM_JWT") as caught:
        list(open_source(where, SourceOptions(token=Secret("worn-out-token"))).read_batches())
    assert "worn-out" not in str(caught.value)


def test_the_token_comes_from_the_environment(
    server: tuple[str, type[Handler]], monkeypatch: pytest.MonkeyPatch
) -> None:
    where, handler = server
    monkeypatch.setenv("SLURM_JWT", "from-outside")
    list(open_source(where, SourceOptions()).read_batches())
    assert {token for _, token in handler.asked} == {"from-outside"}


def test_nobody_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rest_source, "_WAITS_S", ())
    with pytest.raises(InputError, match="does not answer"):
        list(open_source(f"slurm+unix://{tmp_path}/none.sock", SourceOptions()).read_batches())
