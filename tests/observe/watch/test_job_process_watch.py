import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.observe.watch import job_process

RUN = """
import os, sys
from meshwright.observe.watch import job_process
report_pid = lambda pid: print(pid, flush=True)
code = job_process.run_job(sys.argv[1:], os.environ, report_pid, lambda: None, 0.05)
sys.exit(code)
"""


def run(code: str, ticks: list[int]) -> int:
    command = [sys.executable, "-c", code]
    return job_process.run_job(command, os.environ, ticks.append, lambda: ticks.append(0), 0.05)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
    ],
)
def test_exit_code_is_the_jobs(code: str, said: int) -> None:
    assert run(code, []) == said


def test_the_watcher_looks_while_the_job_runs() -> None:
    ticks: list[int] = []
    assert run("import time; time.sleep(0.4)", ticks) == 0
    assert ticks[0] > 1
    assert ticks.count(0) >= 3


def test_a_command_that_is_not_there_is_the_users_mistake() -> None:
    with pytest.raises(InputError, match="cannot be started"):
        job_process.run_job(["no-such-program"], os.environ, lambda _: None, lambda: None, 0.05)


def test_signals_are_handed_on_once_and_the_job_decides(tmp_path: Path) -> None:
    told = tmp_path / "told"
    code = (
        "import signal, time, sys\n"
        f"def end(number, frame):\n    open({str(told)!r}, 'a').write(f'{{number}} ')\n"
        "signal.signal(signal.SIGINT, end); signal.signal(signal.SIGTERM, end)\n"
        "print('ready', flush=True)\n"
        "for _ in range(15): time.sleep(0.1)\n"
        "sys.exit(5)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", RUN, sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as watcher:
        assert watcher.stdout is not None
        watcher.stdout.readline()
        assert watcher.stdout.readline() == "ready\n"
        os.killpg(watcher.pid, signal.SIGINT)  # as `timeout` does: to the whole group
        time.sleep(0.4)
        watcher.send_signal(signal.SIGTERM)
        assert watcher.wait(30) == 5
    assert told.read_text().split() == ["2", "15"]


def test_a_watcher_that_is_killed_takes_the_job_with_it(tmp_path: Path) -> None:
    code = "import time; print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen(
        [sys.executable, "-c", RUN, sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as watcher:
        assert watcher.stdout is not None
        pid = int(watcher.stdout.readline())
        watcher.stdout.readline()
        watcher.kill()
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.05)
    pytest.fail("the job outlived its watcher")


DURING_A_LOOK = """
import os, signal, sys, threading, time
from meshwright.observe.watch import job_process
# Whoever runs tests in the background has them ignore SIGINT, and what is ignored stays so.
signal.signal(int(sys.argv[1]), signal.SIG_DFL)
# A library's thread from before signals are blocked, as numpy's BLAS has.
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
sent = []
def tick():
    if not sent and os.path.exists(sys.argv[2]):
        sent.append(os.kill(os.getpid(), int(sys.argv[1])))
        time.sleep(0.1)
code = job_process.run_job(sys.argv[3:], os.environ, lambda pid: None, tick, 0.05)
print("ended", flush=True)
sys.exit(code)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_a_look_is_handed_on_too(tmp_path: Path, number: signal.Signals) -> None:
    ready = str(tmp_path / "ready")
    code = (
        "import signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit(9))\n"
        f"open({ready!r}, 'w')\n"
        "time.sleep(30)"
    )
    words = [str(int(number)), ready, sys.executable, "-c", code]
    command = [sys.executable, "-c", DURING_A_LOOK, *words]
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (9, "ended\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_with_the_jobs_end_does_not_end_the_watcher(
    number: signal.Signals,
) -> None:
    def tick() -> None:
        time.sleep(0.5)  # The job ends meanwhile, and nobody waits for signals any more.
        os.kill(os.getpid(), number)

    command = [sys.executable, "-c", "import time; time.sleep(0.2); raise SystemExit(4)"]
    assert job_process.run_job(command, os.environ, lambda _: None, tick, 0.05) == 4
