"""Who may ask and who may change the engine, and that no secret is written down."""

import json
import logging
from collections.abc import Collection
from pathlib import Path

import pytest

from meshwright.errors import InputError, Problem
from meshwright.run.serve.client.routed_client import RoutedEngineClient
from meshwright.run.serve.engine_client import MEMORY_TAGS, EngineDeadError, MemoryTag
from meshwright.run.serve.server import BackgroundServer, ServerConfig, create_app
from meshwright.run.serve.server.api_keys import read_api_keys
from tests.run.serve.server.pretend import Bytes, PretendEngine
from tests.run.serve.server.serving import HELLO, TEXT, serving
from tests.run.serve.server.wire import send


def test_keys_are_asked_for_and_name_who_asks(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# who may\nann: 0123456789\nbob: abcdefghij\n")
    with serving(api_key_file=file) as (served, engine):
        got = send(served.url, TEXT, HELLO)
        assert (got.status, got.headers["www-authenticate"]) == (401, "Bearer")
        assert got.error["code"] == "invalid_api_key"
        for wrong in ("Bearer 012345678", "Bearer ", "Basic 0123456789", "0123456789", "Bearer é"):
            headers = {"authorization": wrong}
            assert send(served.url, TEXT, HELLO, headers=headers).status == 401
        key = {"authorization": "Bearer abcdefghij"}
        assert send(served.url, TEXT, {**HELLO, "user": "eve"}, headers=key).status == 200
        # Whoever has a key is one tenant, whatever users it names.
        assert engine.asked[-1].tenant == "bob"
        assert send(served.url, "/v1/models").status == 401
        assert send(served.url, "/v1/models", headers=key).status == 200
        # A key is asked for before a body is read.
        assert send(served.url, TEXT, b"{").status == 401
        assert send(served.url, "/health").status == 200


def test_keys_come_from_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEYS", "0123456789, carl: abcdefghij")
    keys = read_api_keys(None, "SOME_KEYS")
    assert len(keys) == 2
    assert keys.authenticate("bearer abcdefghij") == "carl"
    assert keys.authenticate("Bearer 0123456789") == "key0"
    assert keys.authenticate("Bearer 0123456780") is None


def test_a_key_is_taken_whole_whatever_it_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nann: 12345678#90  # with a remark\n")
    monkeypatch.setenv("MESHWRIGHT_API_KEY", "bob: abcdefgh\nijklmnop,\nqrst#uvwx\n")
    keys = read_api_keys(file, "MESHWRIGHT_API_KEY")
    assert len(keys) == 4
    for key in ("12345678#90", "abcdefgh", "ijklmnop", "qrst#uvwx"):
        assert keys.authenticate(f"Bearer {key}") is not None
    assert keys.authenticate("Bearer 12345678") is None
    monkeypatch.setenv("MESHWRIGHT_API_KEY", "abcdefgh\tijklmnop")
    with pytest.raises(InputError, match="without spaces"):
        read_api_keys(None, "MESHWRIGHT_API_KEY")


@pytest.mark.parametrize("text", ["", "# none\n", "ann: short\n", "ann: two words here\n"])
def test_a_file_without_good_keys_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        read_api_keys(file, "NO_KEYS")
    assert "short" not in str(caught.value).replace("a key needs", "")
    with pytest.raises(InputError, match="cannot read"):
        read_api_keys(tmp_path / "none", "NO_KEYS")


def test_what_changes_the_engine_needs_an_admin(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as (served, engine):
        assert send(served.url, "/sleep", {}).status == 403
        assert not engine.sleeps
    monkeypatch.setenv("MESHWRIGHT_ADMIN_API_KEY", "root: 0123456789")
    with serving() as (served, engine):
        assert send(served.url, "/sleep", {}).status == 401
        key = {"authorization": "Bearer 0123456789"}
        assert send(served.url, "/sleep", b"", headers=key).json == {"is_sleeping": True}
        assert send(served.url, "/is_sleeping").json == {"is_sleeping": True}
        assert send(served.url, TEXT, HELLO).error["code"] == "engine_sleeping"
        assert send(served.url, "/wake_up", {}, headers=key).json == {"is_sleeping": False}
        assert send(served.url, TEXT, HELLO).status == 200
        assert send(served.url, "/update_weights", {"path": "new"}, headers=key).status == 200
        assert engine.path == "new"
        got = send(served.url, "/update_weights", {"path": "nowhere"}, headers=key)
        assert (got.status, got.error["param"]) == (400, "path")


def test_a_key_for_asking_changes_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_ADMIN_API_KEY", "root: 0123456789")
    monkeypatch.setenv("MESHWRIGHT_API_KEY", "ann: 9876543210")
    with serving() as (served, engine):
        codes = {
            key: send(served.url, "/sleep", {}, headers={"authorization": f"Bearer {key}"}).status
            for key in ("9876543210", "neither-of-them")
        }
        assert codes == {"9876543210": 403, "neither-of-them": 401}
        assert not engine.sleeps


def test_an_admin_may_be_anybody_where_that_is_wanted() -> None:
    with serving(allow_unauthenticated_admin=True) as (served, _):
        assert send(served.url, "/sleep", {"level": 2}).status == 200
        assert send(served.url, "/sleep", {"level": 3}).error["param"] == "level"


def test_no_page_changes_the_engine_unless_it_is_named() -> None:
    page = {"origin": "https://elsewhere.example"}
    with serving(allow_unauthenticated_admin=True) as (served, engine):
        got = send(served.url, "/sleep", {}, headers=page)
        assert (got.status, got.error["code"]) == (403, "permission_denied")
        assert not engine.sleeps
    with serving(
        allow_unauthenticated_admin=True, allowed_origins=("https://elsewhere.example",)
    ) as (served, _):
        assert send(served.url, "/sleep", {}, headers=page).status == 200


def test_weights_may_wake_before_the_cache() -> None:
    with serving(allow_unauthenticated_admin=True) as (served, engine):
        send(served.url, "/sleep", {})
        assert send(served.url, "/wake_up", {"tags": ["weights"]}).json == {"is_sleeping": True}
        assert engine.woken == ["weights"]
        assert send(served.url, TEXT, HELLO).error["code"] == "engine_sleeping"
        for tags in (["keys"], []):
            got = send(served.url, "/wake_up", {"tags": tags})
            assert (got.status, got.error["param"]) == (400, "tags[0]" if tags else "tags")
        assert send(served.url, "/wake_up", {"tags": ["kv_cache"]}).json == {"is_sleeping": False}
        assert engine.woken == ["weights", "cache"]
        assert send(served.url, TEXT, HELLO).status == 200


def test_a_change_that_cannot_be_made_is_told() -> None:
    class Busy(PretendEngine):
        async def sleep(self, level: int) -> None:
            raise InputError([Problem("engine", f"cannot sleep, not even {level}")])

        async def wake_up(self, parts: Collection[MemoryTag] = MEMORY_TAGS) -> None:
            raise EngineDeadError(f"it is dead, with {len(parts)} parts")

    engine = Busy()
    settings = ServerConfig(
        model="parrot", port=0, allow_unauthenticated_admin=True, access_log=False
    )
    with BackgroundServer(create_app(engine, Bytes(), settings), settings) as served:
        got = send(served.url, "/sleep", {})
        assert (got.status, got.error["param"]) == (400, "engine")
        got = send(served.url, "/wake_up", {})
        assert (got.status, got.error["message"]) == (503, "it is dead, with 2 parts")


def test_several_engines_change_together() -> None:
    engines = [PretendEngine(), PretendEngine()]
    settings = ServerConfig(
        model="parrot", port=0, allow_unauthenticated_admin=True, access_log=False
    )
    with BackgroundServer(
        create_app(RoutedEngineClient(engines), Bytes(), settings), settings
    ) as served:
        assert send(served.url, "/sleep", {}).json == {"is_sleeping": True}
        assert all(engine.sleeps for engine in engines)
        assert send(served.url, TEXT, HELLO).error["code"] == "engine_sleeping"
        assert send(served.url, "/wake_up", {}).json == {"is_sleeping": False}
        assert send(served.url, "/update_weights", {"path": "new"}).status == 200
        assert [engine.path for engine in engines] == ["new", "new"]


def test_the_access_log_names_what_broke_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "meshwright.access"), serving() as (served, engine):
        send(served.url, TEXT, {"prompt": "a"})
        send(served.url, TEXT, {"prompt": 1})
        engine.fails_at = 3
        send(served.url, TEXT, {"prompt": "hello", "stream": True})
    lines = [json.loads(record.message) for record in caplog.records]
    told = [(line["status"], line.get("error")) for line in lines]
    assert told == [(200, None), (400, "invalid_type"), (200, "engine_error")]


def test_the_access_log_holds_no_secrets(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys"
    file.write_text("ann: 0123456789\n")
    with (
        caplog.at_level(logging.INFO, "meshwright.access"),
        serving(api_key_file=file) as (served, _),
    ):
        headers = {"authorization": "Bearer 0123456789", "x-request-id": "mine-1"}
        path = f"{TEXT}?api_key=0123456789"
        got = send(served.url, path, {"prompt": "private"}, headers=headers)
        assert got.headers["x-request-id"] == "mine-1"
        assert got.json["id"] == "cmpl-mine-1"
        got = send(served.url, "/hidden-0123456789", headers={"x-request-id": "two\twords"})
        assert len(got.headers["x-request-id"]) == 24
    lines = [json.loads(record.message) for record in caplog.records]
    assert "0123456789" not in caplog.text
    assert "private" not in caplog.text
    assert lines[0]["key"] == "ann"
    assert (lines[0]["path"], lines[0]["status"]) == (TEXT, 200)
    assert (lines[0]["prompt_tokens"], lines[0]["output_tokens"]) == (8, 9)
    assert (lines[1]["path"], lines[1]["status"]) == ("other", 404)
