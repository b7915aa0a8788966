"""`mw train` by several processes: what cannot begin is refused before it does, in one message."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="ranks meet at a store of torch's")

from meshwright.cli import main
from meshwright.run.parallel.launch import local
from meshwright.run.parallel.launch.exit_summary import JobExit
from meshwright.run.train.run_folder.run_folder import lock_run_folder
from tests.run.train.tiny import write_corpus, write_job

TRAIN = (sys.executable, "-m", "meshwright", "train")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job file, beside its tokens."""
    folder = tmp_path_factory.mktemp("tiny")
    return write_job(folder / "tiny.toml", write_corpus(folder))


def started(words: list[str], folder: Path, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TRAIN, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def two_ranks(words: list[str], folder: Path, own: str = "") -> list[subprocess.Popen[str]]:
    """Start two processes as a launcher does; each may have a word of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return [
        started(
            [*words, *([own.format(rank=rank)] if own else [])],
            folder,
            **place,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            MASTER_PORT=str(port),
        )
        for rank in range(2)
    ]


@pytest.fixture
def no_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the start of a rank fail a test."""

    def start(*_: object, **__: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr(local, "_started", start)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("no_ranks")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["layout.tp=3"], "error: command line: layout.tp: 3 does not divide the 2 attention"),
        (
            ["layout.pp=2", "layout.dp=2"],
            "error: --nproc-per-node: 2 is not the number of ranks of the layout, which",
        ),
        (["layout.dp=2", "data.sources=nowhere"], "error: nowhere: there is no such folder"),
        (["layout.dp=2", "--output-dir", "file"], "error: file: is a file, and a run needs a"),
        (["layout.dp=2", "--output-dir", "held"], "error: held: another process trains in this"),
    ],
)
def test_what_no_rank_could_run_is_refused_before_any_starts(
    words: list[str],
    said: str,
    job: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    with lock_run_folder(tmp_path / "held"):
        assert main(["train", str(job), *words, "--nproc-per-node", "2"]) == 2
    assert capsys.readouterr().err.startswith(said)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.usefixtures("no_ranks")
def test_a_port_that_is_asked_for_is_the_one_that_is_bound(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert main(["train", str(job), "layout.dp=2", "--nproc-per-node", "2"]) == 2
    assert f"error: MASTER_PORT: {port} cannot be had" in capsys.readouterr().err


def test_a_lost_rank_is_told_with_the_step_and_the_command_that_goes_on(
    job: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "a run"
    (run / "checkpoints" / "000001-step-5").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 6, "loss": 1.0}\n{"step": 7, "lo')
    ending = JobExit(4, "rank 1 was killed by SIGKILL after 9.0 s", "rank 1 died", reporter_rank=0)
    monkeypatch.setattr(local, "launch_local", lambda *_, **__: ending)
    with pytest.raises(SystemExit) as left:
        main(
            [
                "train",
                str(job),
                "layout.dp=2",
                "--output-dir",
                str(run),
                "--no-resume",
                "--nproc-per-node",
                "2",
            ]
        )
    assert left.value.code == 4
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first == f"error: {ending.cause}; step 6 was the last to end"
    command = f"mw train {job} layout.dp=2 --output-dir '{run}' --nproc-per-node 2"
    assert last == f"  hint: step 5 is saved, and this goes on from it: {command}"


def test_processes_with_different_words_are_refused_in_the_same_words(
    job: Path, tmp_path: Path
) -> None:
    ranks = two_ranks([str(job), "layout.dp=2"], tmp_path, own="seed={rank}")
    ends = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    assert ends[0] == ends[1]
    assert "rank 1 has another job than rank 0: seed is 1 there and 0 on rank 0" in ends[0][1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_folder_in_use_is_refused_by_all_processes_in_the_same_words(
    job: Path, tmp_path: Path
) -> None:
    with lock_run_folder(tmp_path / "held"):
        ranks = two_ranks([str(job), "layout.dp=2", "--output-dir", "held"], tmp_path)
        ends = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    assert ends[0] == ends[1]
    assert ends[0][1].startswith("error: held: another process trains in this folder")
