"""`mw bench serve`: a load from the command line, its files, and two results side by side."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli.entry_point import main, run_command
from meshwright.observe.bench.serving.load_generator import GeneratorStats
from meshwright.observe.bench.serving.serving_result import load_result, save_result
from tests.observe.bench.serving.fake_server import FakeServer, serving
from tests.observe.bench.serving.served_requests import result_of, run_of, served


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeServer]:
    with serving() as found:
        yield found


def _run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    code = main(["bench", "serve", *words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def test_one_load_in_full(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--concurrency", "4", "--requests", "9", "--output", "5", "--slo", "ttft=60s"]
    code, said, _ = _run(capsys, fake.url, *words)
    assert code == 0
    (run,) = said["runs"]
    assert (run["sent"], run["completed"], run["goodput_share"]) == (9, 9, 1.0)
    assert set(run["latency"]) == {"ttft", "itl", "tpot", "e2e"}
    assert run["num_output_length_mismatches"] == run["num_prompt_length_mismatches"] == 0
    assert said["server"]["software"] == "tests 1.2"


def test_a_result_repeats_itself_and_is_shown_again(
    fake: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "a.json")
    words = [fake.url, "--rate", "50,90", "--requests", "6", "--output", "3", "--save-result", path]
    _, said, _ = _run(capsys, *words)
    assert [run["name"] for run in said["runs"]] == ["50 requests/s", "90 requests/s"]
    assert shlex.split(load_result(path).command)[:3] == ["mw", "bench", "serve"]
    assert sorted(shlex.split(load_result(path).command)[3:]) == sorted(words)
    _, shown, _ = _run(capsys, "--show", path)
    assert shown["runs"] == said["runs"]


def test_an_objective_is_kept_with_its_result(
    fake: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "a.json")
    words = [fake.url, "--requests", "3", "--output", "3", "--slo", "ttft=60s,e2e=1us"]
    _, said, _ = _run(capsys, *words, "--save-result", path)
    _, shown, _ = _run(capsys, "--show", path)
    assert shown["slo"] == said["slo"] == {"ttft": 60.0, "e2e": 1e-6}
    assert shown["runs"][0]["goodput_share"] == said["runs"][0]["goodput_share"] == 0.0
    _, other, _ = _run(capsys, "--show", path, "--slo", "ttft=60s")
    assert other["runs"][0]["goodput_share"] == 1.0
    for old in ("--slo speed=1s", "--no-such-flag 3"):
        save_result(
            result_of(run_of([served(0, 0.0, [5, 5])]), command=f"mw bench serve {old}"), path
        )
        assert _run(capsys, "--show", path)[1]["slo"] is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--show", "A", "--rate", "5"], "--rate: is not read with --show"),
        (["--show", "A", "--compare", "A", "A"], "--show: is not read with --compare"),
        (["http://h", "--compare", "A", "A"], "URL: is not read with --compare"),
        (["http://h", "--show", "A"], "URL: is not read with --show"),
        (["--compare", "A", "A", "--slo", "ttft=1s"], "--slo: is not read with --compare"),
        (
            ["http://h", "--check-answers-against", "A", "--check-answers"],
            "--check-answers: answers are compared",
        ),
    ],
)
def test_flags_that_nobody_would_read_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "a.json")
    save_result(result_of(run_of([served(n, n / 10, [5, 5]) for n in range(3)])), path)
    assert main(["bench", "serve", *(path if word == "A" else word for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_answers_to_other_prompts_are_not_compared(
    fake: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "a.json")
    words = [fake.url, "--requests", "3", "--output", "3", "--prompt", "20"]
    _run(capsys, *words, "--save-result", path, "--check-answers")
    asked = fake.asked
    for more, said in (
        (["--prompt", "30"], "the prompts differ: that of request 0 has 20 tokens, here 30"),
        (["--vocab-size", "99"], "the prompts differ: it was made with another --vocab-size"),
    ):
        assert main(["bench", "serve", *words, *more, "--check-answers-against", path]) == 2
        err = capsys.readouterr().err
        assert said in err
        assert "--prompt 20" in err
    assert fake.asked == asked


def test_pictures_and_timelines_are_written(
    fake: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    svg, folder = tmp_path / "a.svg", tmp_path / "timeline"
    words = ["--concurrency", "1,3", "--requests", "5", "--output", "4"]
    _run(capsys, fake.url, *words, "--plot", str(svg), "--timeline", str(folder))
    for title in ("Time to first token by percentile", "Output tokens over time", "under load"):
        assert title in svg.read_text()
    assert run_command(["timeline", "show", str(folder)]).data["ranks"] == [0, 1]


def test_a_timeline_that_is_there_is_no_reason_to_lose_a_load(
    fake: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rank-0.parquet").touch()
    asked = fake.asked
    assert main(["bench", "serve", fake.url, "--timeline", str(tmp_path)]) == 2
    assert "has a timeline already" in capsys.readouterr().err
    assert fake.asked == asked


def test_answers_are_checked_against_an_earlier_result(
    fake: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "a.json")
    words = [fake.url, "--concurrency", "3", "--requests", "5", "--output", "4"]
    code, said, _ = _run(capsys, *words, "--save-result", path, "--check-answers")
    assert (code, said["answer_check"]["num_same"]) == (0, 5)
    code, said, _ = _run(capsys, *words, "--check-answers-against", path)
    assert (code, said["answer_check"]["num_same"], said["answer_check"]["different"]) == (0, 5, [])
    before = load_result(path)
    first, *rest = before.runs[0].requests
    other = served(
        0,
        0.0,
        [1],
        output=(1, 2),
        answer_hash="x",
        requested_prompt_tokens=first.requested_prompt_tokens,
    )
    save_result(result_of(run_of([other, *rest]), request_options=before.request_options), path)
    code, said, _ = _run(capsys, *words, "--check-answers-against", path)
    assert code == 1
    assert said["answer_check"]["different"][0].startswith("request 0: token 0 is")
    assert main(["bench", "serve", *words, "--check-answers-against", path, "--seed", "1"]) == 2
    assert "add --seed 0" in capsys.readouterr().err


def test_failures_make_the_exit_code_1(
    fake: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.fault, fake.fault_every = "busy", 4
    try:
        words = [fake.url, "--concurrency", "2", "--requests", "8", "--num-warmups", "0"]
        assert main(["bench", "serve", *words]) == 1
    finally:
        fake.fault = ""
    out, err = capsys.readouterr()
    assert "2 HTTP 429" in out
    assert "too many requests" in err


def test_the_key_comes_from_the_environment_and_is_written_nowhere(
    fake: FakeServer,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("THE_KEY", "sesame")
    path = tmp_path / "a.json"
    _run(
        capsys, fake.url, "--requests", "1", "--api-key-env", "THE_KEY", "--save-result", str(path)
    )
    assert fake.written[-1].headers["Authorization"] == "Bearer sesame"
    assert "sesame" not in path.read_text()
    assert main(["bench", "serve", fake.url, "--api-key-env", "NO_SUCH_KEY"]) == 3


def test_two_results_are_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, slower in zip(paths, (1.0, 2.0), strict=True):
        found = [served(n, n / 10, [slower * (50 + n % 7), 10 + n % 3, 10]) for n in range(60)]
        save_result(result_of(run_of(found)), path)
    svg = str(tmp_path / "c.svg")
    code, said, _ = _run(capsys, "--compare", *paths, "--plot", svg)
    assert code == 0
    lines = {line["name"]: line for line in said["runs"][0]["differences"]}
    assert lines["ttft mean"]["is_significant"]
    assert not lines["itl mean"]["is_significant"]
    assert main(["bench", "serve", "--compare", *paths]) == 0
    out, _ = capsys.readouterr()
    assert "worse" in out
    assert "within noise" in out
    assert ">a " in Path(svg).read_text()


def test_a_slow_generator_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(tmp_path / "a.json")
    save_result(
        result_of(run_of([served(0, 0.0, [1, 1])], generator=GeneratorStats(cpu_share=0.99))), path
    )
    assert main(["bench", "serve", "--show", path]) == 0
    assert "the load generator was the bottleneck" in capsys.readouterr().err


def test_lengths_that_the_server_did_not_keep_are_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(tmp_path / "a.json")
    save_result(result_of(run_of([served(0, 0.0, [1, 1], requested_output_tokens=9)])), path)
    main(["bench", "serve", "--show", path])
    assert "ignores ignore_eos" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["http://me:secret@host"],
        ["http://h", "--extra-body", "[1]"],
        ["http://h", "--slo", "speed=1s"],
        ["http://h", "--save-result", "/no/such/folder/a.json"],
        ["http://h", "--plot", "load.png"],
        ["http://h", "--temperature", "-1"],
        ["--show", "/no/such/file.json"],
        ["--compare", "/no/such/a.json", "/no/such/b.json"],
    ],
)
def test_mistakes_are_named_before_any_server_is_asked(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *words]) == 2
    err = capsys.readouterr().err
    assert "fix:" in err or "hint:" in err
    assert "secret" not in err


def test_a_file_that_is_no_result_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    for text in ('{"format": 1}', "{", "[]"):
        path.write_text(text)
        assert main(["bench", "serve", "--show", str(path)]) == 2
        assert "not a result file" in capsys.readouterr().err


def test_a_result_of_an_older_version_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"format": "meshwright.bench.serve.result/1", "asking": {"model": "m"}}')
    assert main(["bench", "serve", "--show", str(path)]) == 2
    err = capsys.readouterr().err
    assert "has the format 'meshwright.bench.serve.result/1'" in err
    assert "measure again" in err


def test_bench_without_a_verb_is_still_the_bench_of_this_machine(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "--show", "/no/such/rows.jsonl"]) == 2
    assert "mw bench -o FILE" in capsys.readouterr().err
