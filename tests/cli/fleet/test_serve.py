"""`mw fleet serve`: one report as page, JSON and metrics, to whoever may see it."""

import argparse
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.cli.fleet import serve
from meshwright.errors import InputError

pytest.importorskip("duckdb")

TOKEN = "a-token-of-some-length"


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.configure(parser)
    return parser.parse_args([*words, "--port", "0"])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    lines = ["job,attempt,submit_s,start_s,end_s,gpus,num_nodes,user,state"]
    lines += [f"{n},0,{3600 * n},{3600 * n},{3600 * n + 7200},8,1,ann,completed" for n in range(24)]
    (tmp_path / "jobs.csv").write_text("\n".join(lines))
    folder = tmp_path / "store"
    words = ["fleet", "ingest", str(tmp_path / "jobs.csv"), "--cluster", "east", "-q"]
    assert main([*words, "--store", str(folder)]) == 0
    return folder


@pytest.fixture
def url(store: Path, tmp_path: Path) -> Iterator[str]:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    words = ["--store", str(store), "--gpus", "64", "--token-file", str(token)]
    with serve.make_server(parsed(*words)) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_address[1]}"
        serving.shutdown()


def get(url: str, token: str = TOKEN) -> tuple[int, str]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_same_hours_are_in_page_json_and_metrics(url: str) -> None:
    code, page = get(f"{url}/")
    assert code == 200
    assert "<html" in page
    code, body = get(f"{url}/report.json")
    assert code == 200
    assert json.loads(body)["schema"] == "meshwright.fleet-report/2"
    code, text = get(f"{url}/metrics")
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    told = [float(value) for name, value in samples.items() if "gpu_hours" in name]
    reported_s = float(samples["meshwright_fleet_reported_seconds"])
    assert sum(told) == pytest.approx(64 * reported_s / 3600, rel=1e-4)
    assert samples['meshwright_fleet_rows{table="jobs"}'] == "24"


def test_nobody_without_the_token_is_answered(url: str) -> None:
    assert get(f"{url}/", "another")[0] == 401
    assert get(f"{url}/metrics", "")[0] == 401
    assert get(f"{url}/etc/passwd")[0] == 404


def test_what_cannot_be_served_is_told(store: Path, tmp_path: Path) -> None:
    assert main(["fleet", "serve", "--store", str(tmp_path / "nowhere")]) == 2
    short = tmp_path / "short"
    short.write_text("abc")
    with pytest.raises(InputError, match="16 or more"):
        serve.make_server(parsed("--store", str(store), "--token-file", str(short)))


def test_a_name_of_a_stranger_is_not_answered(store: Path) -> None:
    """A page of another site can have its name lead here; the browser then sends that name."""
    for words, code in ((), 403), (("--allowed-hosts", "fleet.example"), 200):
        with serve.make_server(parsed("--store", str(store), *words)) as serving:
            threading.Thread(target=serving.serve_forever, daemon=True).start()
            url = f"http://127.0.0.1:{serving.server_address[1]}/metrics"
            request = urllib.request.Request(url, headers={"Host": "fleet.example"})
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    found = answer.status
            except urllib.error.HTTPError as error:
                found = error.code
            serving.shutdown()
        assert found == code
