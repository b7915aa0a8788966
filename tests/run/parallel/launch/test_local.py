"""Ranks of one machine: they meet, speak, and end together."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.run.parallel.launch import local

MEET = Path(__file__).with_name("meet.py")
PROGRAM = (sys.executable, str(MEET))
ENTRY = (
    "import sys; from meshwright.run.parallel.launch import local; "
    "ending = local.launch_local(sys.argv[2:], int(sys.argv[1]), "
    f"program=[sys.executable, {str(MEET)!r}]); "
    "sys.stderr.write(f'error: {ending.cause}' * bool(ending.cause)); sys.exit(ending.exit_code)"
)


def started(ranks: int, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", ENTRY, str(ranks), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(ranks: int, *words: str) -> tuple[int, str, str]:
    process = started(ranks, *words)
    out, errors = process.communicate(timeout=90)
    return process.returncode, out, errors


def test_ranks_meet_and_the_first_speaks_plainly() -> None:
    code, out, errors = ended(3)
    assert (code, out) == (0, "sum 3 of 3\n")
    assert sorted(errors.splitlines()) == ["[rank 1] sum 3 of 3", "[rank 2] sum 3 of 3"]


@pytest.mark.slow
def test_another_job_on_one_rank_is_refused_by_all_with_one_message() -> None:
    code, out, errors = ended(3, "--lr", "3e-4", "--of", "2")
    assert (code, out) == (2, "")
    assert errors == (
        "error: job: rank 2 has another job than rank 0: optimizer.lr is 3e-4 there and 1e-3 on "
        "rank 0 (fix: give every rank the same file and flags)\n"
    )


def test_a_rank_that_ends_badly_ends_the_others_and_is_named() -> None:
    code, _, errors = ended(3, "--stay", "--end", "7", "--of", "1")
    assert code == 7
    assert errors.count("was asked 1 times") == 2
    assert re.search(
        r"^error: rank 1 ended with exit code 7 after \d+\.\d s; rank 0 was ended for it$",
        errors,
        re.MULTILINE,
    )


def test_ranks_that_do_not_listen_are_killed_within_seconds() -> None:
    began = time.monotonic()
    code, _, errors = ended(3, "--stay", "--deaf", "--end", "7", "--of", "1")
    assert code == 7
    assert errors.endswith("; ranks 0, 2 were ended for it")
    assert time.monotonic() - began < 30


def test_a_signal_that_kills_a_rank_is_named() -> None:
    code, _, errors = ended(2, "--stay", "--end", str(-signal.SIGKILL), "--of", "1")
    assert code == 4
    assert "error: rank 1 was killed by SIGKILL" in errors


def test_an_interrupt_before_ranks_listen_is_quiet() -> None:
    process = started(2, "--wait")
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert set(errors.split()) <= {"interrupted"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_every_rank_once(number: signal.Signals) -> None:
    process = started(2, "--stay")
    assert process.stderr is not None
    lines = [process.stderr.readline(), process.stderr.readline()]
    assert sorted(lines) == ["[rank 1] rank 1 is ready\n", "rank 0 is ready\n"]
    process.send_signal(number)
    _, rest = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert rest.count("was asked 1 times") == 2


def test_ranks_end_with_whoever_started_them() -> None:
    process = started(2, "--stay")
    assert process.stderr is not None
    process.stderr.readline()
    process.stderr.readline()
    process.kill()
    # Both ends of the pipe belong to ranks now: it closes when they are gone.
    assert process.communicate(timeout=10) is not None


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"MASTER_PORT: {port} cannot be had: Address"):
            local.launch_local([str(mark)], 2, port=port, program=["touch"])
    assert not mark.exists()


@pytest.mark.parametrize("ranks", [0, -1, 5000])
def test_a_number_of_ranks_that_cannot_be_is_refused(ranks: int) -> None:
    with pytest.raises(InputError, match="--nproc-per-node"):
        local.launch_local([], ranks)


def test_cores_are_shared_out_unless_the_user_did() -> None:
    assert local.make_rank_environment(1, 4, 9, {}, cores=10)["OMP_NUM_THREADS"] == "2"
    assert local.make_rank_environment(1, 4, 9, {}, cores=2)["OMP_NUM_THREADS"] == "1"
    given = local.make_rank_environment(1, 4, 9, {"OMP_NUM_THREADS": "7"}, cores=2)
    assert given["OMP_NUM_THREADS"] == "7"


def test_ranks_do_not_take_themselves_for_tasks_of_an_outer_launcher() -> None:
    outer = {"SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "4"}
    found = local.make_rank_environment(1, 2, 9, outer, cores=2)
    assert "SLURM_PROCID" not in found
    assert found["SLURM_JOB_ID"] == "4"


@pytest.mark.slow
def test_torchrun_does_just_as_well() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(MEET)],
        capture_output=True,
        text=True,
        timeout=90,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("sum 1 of 2") == 2
