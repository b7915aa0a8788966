"""The client against a server that misbehaves."""

import gzip
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from meshwright.errors import InputError, MissingDependency
from meshwright.fleet.sources.prometheus.client import PrometheusClient, RetryPolicy
from meshwright.fleet.sources.prometheus.credentials import read_credentials
from meshwright.fleet.sources.prometheus.prometheus_source import open_source
from meshwright.fleet.sources.source import Secret, SourceOptions

Answer = tuple[int, dict[str, str], bytes]
Reply = Callable[["Request"], Answer]


class Request:
    """What was asked."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self.method, self.path = handler.command, urlsplit(handler.path).path
        length = int(handler.headers.get("Content-Length") or 0)
        text = handler.rfile.read(length).decode() if length else urlsplit(handler.path).query
        self.words = {name: values[0] for name, values in parse_qs(text).items()}
        self.headers = handler.headers


class Fake:
    """A server whose answers a test writes down."""

    def __init__(self) -> None:
        self.replies: list[Reply] = []
        self.clients: list[PrometheusClient] = []
        self.asked: list[Request] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                request = Request(self)
                fake.asked.append(request)
                reply = fake.replies.pop(0) if len(fake.replies) > 1 else fake.replies[0]
                status, headers, body = reply(request)
                if status == 0:  # hangs up
                    self.close_connection = True
                    return
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if "Content-Length" not in headers:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                self.close_connection = "Content-Length" in headers

            def do_POST(self) -> None:
                self.do_GET()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.01])
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake()
    yield server
    server.close()


def _success(data: Any, **more: Any) -> Answer:
    return 200, {}, json.dumps({"status": "success", "data": data, **more}).encode()


def _matrix(*series: tuple[dict[str, str], list[list[Any]]]) -> Answer:
    found = [{"metric": labels, "values": values} for labels, values in series]
    return _success({"resultType": "matrix", "result": found})


def _client(fake: Fake, **more: Any) -> PrometheusClient:
    patience = RetryPolicy(30.0, 5.0)
    fake.clients.append(PrometheusClient(fake.url, sleep=lambda _: None, patience=patience, **more))
    return fake.clients[-1]


def test_numbers_are_text_and_some_of_them_are_none(fake: Fake) -> None:
    values = [[10, "1.5"], [20, "NaN"], [30, "+Inf"], [40, "-Inf"]]
    fake.replies = [lambda _: _matrix(({"a": "b"}, values))]
    (series,) = _client(fake).query_range("m", 10, 40, 10)
    assert series.labels == {"a": "b"}
    assert series.values[0] == 1.5
    assert np.isnan(series.values[1])
    assert series.values[2:].tolist() == [np.inf, -np.inf]


def test_a_compressed_answer_is_read(fake: Fake) -> None:
    body = gzip.compress(_matrix(({}, [[1, "2"]]))[2])
    fake.replies = [lambda _: (200, {"Content-Encoding": "gzip"}, body)]
    assert _client(fake).query_instant("m", 1)[0].values.tolist() == [2.0]


@pytest.mark.parametrize(
    "fault",
    [
        (0, {}, b""),
        (503, {"Retry-After": "1"}, b"Service Unavailable"),
        (429, {}, b'{"status": "error", "error": "slow down"}'),
        (200, {}, b'{"status": "success", "data": {"resu'),
        (200, {"Content-Length": "5000"}, b'{"status": "succ'),
    ],
    ids=["hangs up", "starts", "is asked too often", "breaks off", "dies mid-answer"],
)
def test_a_server_that_drops_out_is_asked_again_and_told_of(fake: Fake, fault: Answer) -> None:
    fake.replies = [lambda _: fault, lambda _: fault, lambda _: _matrix(({}, [[1, "2"]]))]
    client = _client(fake)
    assert client.query_instant("m", 1)[0].values.tolist() == [2.0]
    (note,) = client.pop_notes()
    assert "dropped out" in note
    assert "2 times" in note
    assert client.pop_notes() == ()


def test_whoever_waits_is_told_once_and_at_once(fake: Fake) -> None:
    said: list[str] = []
    fake.replies = [lambda _: (503, {}, b""), lambda _: (503, {}, b""), lambda _: _matrix()]
    _client(fake, tell=said.append).query_instant("m", 1)
    (line,) = said
    assert line.endswith("does not answer: HTTP 503; asking again for up to 30 s")


def test_patience_ends_and_the_error_says_where(fake: Fake) -> None:
    fake.replies = [lambda _: (503, {}, b"")]
    with pytest.raises(MissingDependency, match=r"127\.0\.0\.1:\d+ does not answer: HTTP 503"):
        _client(fake).query_instant("m", 1)


def test_a_server_that_was_never_reached_is_given_up_sooner() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Nobody listens there.
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        slept: list[float] = []
        client = PrometheusClient(url, sleep=slept.append, patience=RetryPolicy(1e6, 5.0, 3.0))
        with pytest.raises(MissingDependency, match="does not answer"):
            client.query_instant("m", 1)
    assert 3 <= sum(slept) < 20


def test_more_points_than_an_answer_may_have_are_asked_for_in_parts(fake: Fake) -> None:
    def reply(request: Request) -> Answer:
        start, end = float(request.words["start"]), float(request.words["end"])
        return _matrix(({"a": "b"}, [[start, "0"], [end, "1"]]))

    fake.replies = [reply]
    (series,) = _client(fake).query_range("m", 0, 25_000, 1)
    assert [each.words["start"] for each in fake.asked] == ["0.000", "10000.000", "20000.000"]
    assert series.time_s.tolist() == [0, 9999, 10000, 19999, 20000, 25000]


def test_a_server_that_refuses_so_much_is_asked_for_half(fake: Fake) -> None:
    def reply(request: Request) -> Answer:
        start, end = float(request.words["start"]), float(request.words["end"])
        if end - start > 3:
            said = "query processing would load too many samples into memory"
            return 422, {}, json.dumps({"status": "error", "error": said}).encode()
        return _matrix(({}, [[at, "1"] for at in range(int(start), int(end) + 1)]))

    fake.replies = [reply]
    (series,) = _client(fake).query_range("m", 0, 9, 1)
    assert series.time_s.tolist() == list(range(10))


def test_a_long_question_goes_into_the_body(fake: Fake) -> None:
    fake.replies = [lambda _: _matrix(({}, []))]
    _client(fake).query_instant("m" * 5000, 1)
    assert [each.method for each in fake.asked] == ["POST"]
    assert fake.asked[0].words["query"] == "m" * 5000


def test_parts_of_a_store_out_of_reach_are_told(fake: Fake) -> None:
    data = {"resultType": "vector", "result": []}
    fake.replies = [lambda _: _success(data, warnings=["store b is gone"], isPartial=True)]
    client = _client(fake)
    client.query_instant("m", 1)
    assert [each.split(" ", 1)[1] for each in client.pop_notes()] == [
        "warns: store b is gone",
        "answered in part: some of its stores were out of reach",
    ]


def test_a_token_goes_to_the_server_and_nowhere_else(fake: Fake, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("very-secret\n")
    who = read_credentials(Secret(""), {"token_file": str(path)})
    fake.replies = [lambda _: (401, {}, b"no")]
    client = _client(fake, who=who)
    with pytest.raises(InputError) as refused:
        client.query_instant("m", 1)
    assert fake.asked[0].headers["Authorization"] == "Bearer very-secret"
    assert (
        "very-secret"
        not in f"{refused.value!r} {refused.value} {client.pop_notes()} {who!r} {vars(client)}"
    )
    path.write_text("another\n")  # a token that was changed meanwhile is used at once
    with pytest.raises(InputError):
        client.query_instant("m", 1)
    assert fake.asked[1].headers["Authorization"] == "Bearer another"


def test_a_redirect_is_not_followed(fake: Fake) -> None:
    fake.replies = [lambda _: (302, {"Location": "http://elsewhere/login?token=1"}, b"")]
    with pytest.raises(InputError, match="sends on to http://elsewhere/login ") as refused:
        _client(fake).query_instant("m", 1)
    assert "token=1" not in str(refused.value)
    assert len(fake.asked) == 1


def test_user_and_tenant_are_sent_as_others_do(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PASSWORD", "b")
    who = read_credentials(Secret(""), {"user": "a", "password_env": "PASSWORD"})
    fake.replies = [lambda _: _matrix(({}, []))]
    _client(fake, who=who, tenant="team").query_instant("m", 1)
    assert fake.asked[0].headers["Authorization"] == "Basic YTpi"
    assert fake.asked[0].headers["X-Scope-OrgID"] == "team"


def test_a_password_in_a_url_is_refused_without_being_shown() -> None:
    with pytest.raises(InputError) as refused:
        open_source("http://me:hidden@host:9090", SourceOptions())
    assert "hidden" not in str(refused.value)
    assert "password_file" in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"token_file": "/nowhere"}, "cannot read"),
        ({"token_env": "NOT_THERE"}, "the environment has no NOT_THERE"),
        ({"user": "a"}, "has no password"),
        ({"colour": "red"}, "options of Prometheus are"),
        ({"renames": "a"}, "write OLD:NEW"),
    ],
)
def test_wrong_options_are_told(options: dict[str, str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        open_source("http://host:9090", SourceOptions(kind_options=options))


def test_a_page_that_is_no_prometheus_is_told_so(fake: Fake) -> None:
    fake.replies = [lambda _: (404, {}, b"<html>")]
    with pytest.raises(InputError, match="add its prefix to the URL"):
        _client(fake).query_instant("m", 1)


def test_labels_and_series_are_asked_for_in_a_time(fake: Fake) -> None:
    fake.replies = [lambda _: _success([{"gpu": "0"}]), lambda _: _success(["east", "west"])]
    client = _client(fake)
    assert client.find_series(["m"], 1, 2) == [{"gpu": "0"}]
    assert client.list_label_values("cluster", "m", 1, 2) == {"east", "west"}
    assert [each.path for each in fake.asked] == ["/api/v1/series", "/api/v1/label/cluster/values"]
    assert fake.asked[0].words == {"match[]": "m", "start": "1.000", "end": "2.000"}
