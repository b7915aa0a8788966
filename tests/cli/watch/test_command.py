"""`mw watch`: what it prints, and whole jobs watched from their start to their end."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright.cli import main
from meshwright.cli.result import FieldsView, NoteView, TableView, TextView
from meshwright.cli.watch.screen import render_status
from meshwright.observe.hardware.hardware_sample import GpuSample, HardwareSummary
from meshwright.observe.watch.watch_status import (
    CaptureStatus,
    HangStatus,
    RankStatus,
    SlowdownStatus,
    WatchStatus,
    write_status,
)

MW = [sys.executable, "-m", "meshwright", "watch"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
LONG_S = 240
"""Test machines are shared: two ranks and their launcher take long to import torch there."""


def rank(number: int, **words: object) -> RankStatus:
    given: dict[str, object] = {"rank": number, "pid": 10 + number, "steps": 900, "step_ms": 101.5}
    given |= {"overhead_share": 0.004, "captures": 3, "state": "running"}
    return msgspec.convert(given | words, RankStatus)


STATUS = WatchStatus(
    command="torchrun train.py",
    watcher_pid=os.getpid(),
    job_pid=1,
    exit_code=1,
    started_unix_s=0.0,
    elapsed_s=91.0,
    processes=3,
    steps=900,
    step_ms=101.5,
    step_time_variation=0.013,
    slowest_ms=250.0,
    overhead_share=0.004,
    max_overhead=0.008,
    capture_interval=512,
    ranks=(rank(0), rank(1, state="killed")),
    captures=(
        CaptureStatus(
            number=1, step=512, steps=1, ranks=2, reason="first", differences="",
            folder="captures/0001-step-512", bytes=60_000, step_ms=101.0,
        ),
        CaptureStatus(
            number=2, step=660, steps=2, ranks=2, reason="slowdown",
            differences="copy 1.00 → 30.00 ms",
            folder="captures/0002-step-660", bytes=60_000, step_ms=130.0, has_device_work=True,
        ),
    ),
    captures_taken=3,
    captures_dropped=1,
    slowdowns=(
        SlowdownStatus(
            step=640, before_ms=101.0, after_ms=130.0, capture="captures/0002-step-660",
            reference="captures/0001-step-512",
            changes=("copy 1.00 → 30.00 ms", "GPU 0's clock fell from 1980 to 1410 MHz"),
        ),
    ),
    hangs=(
        HangStatus(
            last_step=900, detected_after_s=120.0, folder="hangs/001-step-900", num_dumps=2,
            positions=(((0,), "train.py:5 in reduce"), ((1,), "train.py:9 in load")),
            diagnosis="rank 1 (certain): never enqueued all_reduce #7",
        ),
    ),
    lost_processes=("rank 1 after step 900: killed by a signal or os._exit",),
    hardware=HardwareSummary(gpus=(GpuSample(0, 0.93, 2**36, 640.0, 61.0, 1410.0, ("sw_power_cap",
    )),)),
)  # fmt: skip


def test_the_screen_tells_steps_cost_slowdowns_stalls_and_what_to_do_next() -> None:
    views = render_status(STATUS, "w")
    said = {
        name: value for view in views if isinstance(view, FieldsView) for name, value in view.fields
    }
    assert said["steps"] == "900 of 101.50 ms ± 1.3 % (middle half), slowest 250.00 ms"
    assert said["watching"].startswith(
        "took 0.40 % of the time (0.8 % allowed); 3 captures, 2 kept"
    )
    assert said["hardware"].startswith("GPU 0 93 % 1410 MHz 640 W 61 °C")
    assert said["flight recorder"].startswith("rank 1")
    tables = {view.title.split(" (")[0]: view for view in views if isinstance(view, TableView)}
    assert tables["slowdowns"].rows[0][:5] == ("640", "101.00", "130.00", "+29 %", "to the end")
    assert tables["ranks"].rows[1][-1] == "killed"
    (stall,) = [view for view in tables.values() if "no step for" in view.title]
    assert stall.rows[1] == ("1", "train.py:9 in load")
    next_steps = [view.body for view in views if isinstance(view, TextView)][-1]
    assert "mw hang w/hangs/001-step-900/flight" in next_steps
    assert "mw diff w/captures/0001-step-512 w/captures/0002-step-660" in next_steps


def test_status_is_read_from_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_status(tmp_path / "status.json", STATUS)
    assert main(["watch", "status", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "meshwright.watch/2"
    assert answer["slowdowns"][0]["step"] == 640
    gone = msgspec.structs.replace(STATUS, exit_code=None, watcher_pid=2**22 + 7)
    write_status(tmp_path / "status.json", gone)
    assert main(["watch", "status", str(tmp_path)]) == 0
    assert "the watcher is gone" in capsys.readouterr().err


def test_a_job_that_never_imports_torch_is_said_so() -> None:
    bare = msgspec.structs.replace(
        STATUS, processes=0, steps=0, ranks=(), captures=(), slowdowns=(), hangs=(), notes=("x",)
    )
    views = render_status(bare, "w")
    assert "no process of the job imported torch" in str(views[0])
    assert any("python -E" in view.body for view in views if isinstance(view, TextView))
    assert NoteView("x") in views


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "there is no job to watch"),
        (["train.py"], "neither a look nor a job"),
        (["status", "nowhere"], "does not exist"),
        (["status", "there"], "is a file"),
        (["--max-overhead", "90", "--", "true"], "outside 0.01 to 50"),
        (["--capture-interval", "x", "--", "true"], "no whole number"),
        (["--out", ".", "--", "true"], "is there already"),
        (["--out", "w", "--", "no-such-program"], "no program that can be started"),
    ],
)
def test_mistakes_name_fault_and_fix(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "there").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *words]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "hint:" in shown


def test_words_after_the_dashes_are_the_jobs_and_so_is_the_exit_code(tmp_path: Path) -> None:
    code = "import sys; print(sys.argv[1:]); sys.exit(3)"
    done = subprocess.run(
        [*MW, "--out", "w", "--", sys.executable, "-c", code, "--json", "--", "--token", "x"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert done.stdout == "['--json', '--', '--token', 'x']\n"
    assert "exit code 3" in done.stderr
    assert (tmp_path / "w").stat().st_mode & 0o777 == 0o700
    kept = (tmp_path / "w" / "status.json").read_text()
    assert "--token (redacted)" in kept


TRAIN = """
import os, sys, time, torch, torch.distributed as distributed
from torch.nn.parallel import DistributedDataParallel

def load(step):
    time.sleep(0.10 if slow and step >= slow else 0.02)
    return torch.randn(8, 32)

def wait_for_ever():
    while True:
        time.sleep(0.05)  # the planted line

steps, slow, hang = map(int, sys.argv[1:])
torch.set_num_threads(1)
distributed.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)]))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(1, steps + 1):
    if step == hang and distributed.get_rank() == 1:
        wait_for_ever()
    optimizer.zero_grad()
    model(load(step)).square().mean().backward()
    optimizer.step()
distributed.destroy_process_group()
print("done", flush=True)
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.mark.slow
def test_a_planted_slowdown_is_found_captured_and_explained(
    train: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*TORCHRUN, str(train), "350", "260", "0"]
    done = subprocess.run(
        [*MW, "--out", "w", "--capture-interval", "50", "--", *command],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LONG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\ndone\n"
    status = json.loads((tmp_path / "w" / "status.json").read_text())
    assert status["steps"] == 350
    assert [row["state"] for row in status["ranks"]] == ["completed", "completed"]
    assert not status["has_errors"]
    # A shared machine has slowdowns of its own, and its noise moves the place of this one.
    found = [one for one in status["slowdowns"] if abs(one["step"] - 260) <= 40]
    assert found, status["slowdowns"]
    assert found[0]["after_ms"] > 1.5 * found[0]["before_ms"]
    assert found[0]["changes"][0].startswith("outside operators")
    assert "from step" in done.stderr
    assert "next: open the traces in w/captures/" in done.stderr
    folders = sorted((tmp_path / "w" / "captures").iterdir())
    assert folders
    for folder in folders:
        assert main(["analyze", str(folder), "--json", "--no-cache"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert [one["rank"] for one in answer["ranks"]] == [0, 1]


@pytest.mark.slow
def test_a_planted_hang_gives_stacks_that_name_the_line_and_ctrl_c_ends_it(
    train: Path, tmp_path: Path
) -> None:
    words = [
        *MW,
        "--out",
        "w",
        "--hang-timeout",
        "2s",
        "--",
        *TORCHRUN,
        str(train),
        "9999",
        "0",
        "40",
    ]
    line = TRAIN.splitlines().index("        time.sleep(0.05)  # the planted line") + 1
    with subprocess.Popen(
        words, cwd=tmp_path, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as watch:  # fmt: skip
        assert _until(lambda: _planted(tmp_path))
        stacks = subprocess.run(
            [*MW, "stacks", "w", "--json"], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        os.killpg(watch.pid, signal.SIGINT)
        _, said = watch.communicate(timeout=LONG_S)
    assert watch.returncode != 0
    (stall,) = _planted(tmp_path)
    place = {tuple(ranks): where for ranks, where in stall["positions"]}
    assert place[(1,)] == f"{train}:{line} in wait_for_ever"
    kept = (tmp_path / "w" / stall["folder"] / "stacks.txt").read_text()
    assert f"{train}:{line} in wait_for_ever" in kept
    assert "rank 1" in stall["diagnosis"]
    assert f"{line} in wait_for_ever" in stacks.stdout
    assert f"mw hang w/{stall['folder']}/flight" in said
    pids = [one["pid"] for one in _status(tmp_path)["ranks"]]
    assert _until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


OWN_PROFILER = """
import torch
model = torch.nn.Linear(8, 8)
optimizers = [torch.optim.AdamW([one]) for one in model.parameters()]

def update():
    for optimizer in optimizers:
        optimizer.step()

def step(update):
    model(torch.randn(2, 8)).sum().backward()
    update()

import time
for number in range(160):
    step(update)
    time.sleep(0.01)
    if number % 7 == 0:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
            step(update)
            time.sleep(0.05)
        assert any("addmm" in event.key for event in own.key_averages())
fast = torch.compile(update, backend="eager")
for _ in range(3):
    step(fast)
print("fine")
"""


@pytest.mark.slow
def test_a_job_that_profiles_itself_compiles_and_has_many_optimizers_is_not_disturbed(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [*MW, "--out", "w", "--capture-interval", "2", "--", sys.executable, "-c", OWN_PROFILER],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=LONG_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fine\n"
    status = _status(tmp_path)
    assert status["steps"] == 160 + 23
    assert status["captures_taken"] > 0
    assert not (tmp_path / "w" / "log.txt").exists()


def _planted(folder: Path) -> list[dict[str, Any]]:
    """The planted stall, once ranks have answered; a busy machine may have others before."""
    found = _status(folder).get("hangs", [])
    return [one for one in found if one["last_step"] == 39 and one["positions"]]


def _status(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "w" / "status.json").read_text())
    except FileNotFoundError:
        return {}
    return found


def _until(true: Callable[[], object]) -> bool:
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        if true():
            return True
        time.sleep(0.2)
    return False


def test_a_folder_that_may_not_be_read_is_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    assert main(["watch", "status", str(tmp_path)]) == 2
    assert "cannot read: Permission denied" in capsys.readouterr().err
