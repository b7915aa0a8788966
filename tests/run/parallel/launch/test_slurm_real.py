"""Scripts of `mw launch slurm --submit`, run by a real Slurm that the test starts."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run.parallel.launch.slurm_cluster import Cluster, slurm

pytestmark = [pytest.mark.slow, pytest.mark.real]

ROOT = Path(__file__).parents[4]
MEET = Path(__file__).with_name("meet.py")
JOB = """
[layout]
dp = 4
[device]
type = "cpu"
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm() as found:
        yield found


def submitted(cluster: Cluster, folder: Path, *words: str, program: str = "") -> str:
    """Submit a job of four ranks on two nodes, of a program or the trainer; return its number."""
    (folder / "job.toml").write_text(JOB)
    job = "job.toml" if program else str(ROOT / "examples/train-tiny.toml")
    command = [sys.executable, "-m", "meshwright", "launch", "slurm", job, *words]
    command += ["--gpus-per-node", "2", "--log", "job.log"]
    command += ["--wrap", program] if program else []
    done = subprocess.run(
        [*command, "--submit", "--json"], cwd=folder, env=cluster.environment,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["nodes"], answer["ranks"]) == (2, 4)
    return str(answer["job_id"])


def log(folder: Path) -> str:
    path = folder / "job.log"
    return path.read_text() if path.exists() else ""


def spoken(folder: Path, words: str, times: int, within_s: float = 60) -> bool:
    """Wait until the log has some words so many times."""
    until = time.monotonic() + within_s
    while log(folder).count(words) < times and time.monotonic() < until:
        time.sleep(0.2)
    return log(folder).count(words) == times


def test_four_ranks_on_two_nodes_run_to_completion(cluster: Cluster, tmp_path: Path) -> None:
    job = submitted(cluster, tmp_path, program=f"{sys.executable} {MEET}")
    state = cluster.wait(job, "COMPLETED", "FAILED", "CANCELLED")
    assert state == "COMPLETED", log(tmp_path)
    assert log(tmp_path).count("sum 6 of 4") == 4


def test_a_model_is_trained_over_four_ranks_to_the_last_step(
    cluster: Cluster, tmp_path: Path
) -> None:
    changes = ("layout.dp=4", "layout.microbatch=2", "workload.tokens=10240")
    words = (*changes, "device.type=cpu", "--output-dir", "run")
    job = submitted(cluster, tmp_path, *words)
    assert cluster.wait(job, "COMPLETED", "FAILED") == "COMPLETED", log(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if row.get("loss") is not None]
    assert rows[-1]["step"] == 10
    assert losses[-1] < losses[0]


def test_ranks_meet_without_variables_of_ours(cluster: Cluster, tmp_path: Path) -> None:
    """What srun itself sets is enough, where the node's name is its address."""
    line = f"env -u MASTER_PORT {sys.executable} {MEET}"
    job = submitted(cluster, tmp_path, program=line)
    assert cluster.wait(job, "COMPLETED", "FAILED") == "COMPLETED", log(tmp_path)


def test_a_rank_that_ends_badly_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    job = submitted(cluster, tmp_path, program=f"{sys.executable} {MEET} --end 7 --of 3")
    assert cluster.wait(job, "COMPLETED", "FAILED") == "FAILED"
    shown = cluster.ask("scontrol", "show", "job", job)
    assert "ExitCode=0:0" not in shown


def test_other_jobs_on_some_ranks_are_refused(cluster: Cluster, tmp_path: Path) -> None:
    job = submitted(cluster, tmp_path, program=f"{sys.executable} {MEET} --lr 3 --of 2")
    assert cluster.wait(job, "COMPLETED", "FAILED") == "FAILED"
    assert "rank 2 has another job than rank 0: optimizer.lr is 3 there" in log(tmp_path)


def test_an_unfit_node_is_named_and_the_job_queues_again(cluster: Cluster, tmp_path: Path) -> None:
    words = ("--disk", "900PB", "--health-restarts", "1")
    job = submitted(cluster, tmp_path, *words, program=f"{sys.executable} {MEET}")
    assert spoken(tmp_path, "the job queues again", 1), log(tmp_path)
    cluster.hasten(job)
    assert cluster.wait(job, "COMPLETED", "FAILED") == "FAILED", log(tmp_path)
    said = log(tmp_path)
    assert "meshwright: node n1: . has" in said
    assert said.count("unfit nodes, the job queues again") == 1
    assert "leave the nodes named above out" in said
    assert "sum" not in said


def test_at_the_time_limit_ranks_are_asked_once_and_the_job_queues_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    words = ("--time", "10", "--restarts", "1")
    job = submitted(cluster, tmp_path, *words, program=f"{sys.executable} {MEET} --stay")
    assert spoken(tmp_path, "is ready", 4), log(tmp_path)
    # What Slurm sends when the limit is near; to wait for it would take minutes.
    cluster.ask("scancel", "--signal=USR1", "--batch", job)
    assert spoken(tmp_path, "the job queues again", 1), log(tmp_path)
    cluster.hasten(job)
    assert spoken(tmp_path, "is ready", 8), log(tmp_path)
    said = log(tmp_path)
    assert said.count("was asked 1 times") == 4, said
    assert said.count("saved at the time limit, the job queues again") == 1
    cluster.ask("scancel", job)
    assert cluster.wait(job, "CANCELLED", "PENDING") == "CANCELLED"
