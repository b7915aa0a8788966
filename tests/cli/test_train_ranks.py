"""`mw train` by several processes: what cannot begin is refused by all in the same words."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="ranks meet at a store of torch's")

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


def test_a_layout_that_does_not_divide_the_model_is_refused_once_for_all_ranks(
    job: Path, tmp_path: Path
) -> None:
    process = started([str(job), "layout.tp=3", "--nproc", "3"], tmp_path)
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, out) == (2, "")
    assert errors.startswith("error: command line: layout.tp: 3 does not divide")
    assert errors.count("attention heads") == 1
    assert "rank" not in errors
    assert list(tmp_path.iterdir()) == []


def test_processes_with_different_words_are_refused_in_the_same_words(
    job: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks = [
        started(
            [str(job), "layout.dp=2", f"seed={rank}"],
            tmp_path,
            **place,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            MASTER_PORT=str(port),
        )
        for rank in range(2)
    ]
    ends = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    assert ends[0] == ends[1]
    assert "rank 1 has another job than rank 0: seed is 1 there and 0 on rank 0" in ends[0][1]
    assert list(tmp_path.iterdir()) == []
