"""Programs that attack the one who judges them get the verdict they earned, and nothing else."""

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright.errors import MissingDependency
from meshwright.run.posttrain.rollout.reward_component import RewardComponent
from meshwright.run.posttrain.rollout.verifiers import (
    VerifierJob,
    VerifierLimits,
    VerifierPool,
    verifier_process,
)
from meshwright.run.posttrain.rollout.verifiers.sandbox.sandbox_config import (
    PROTECTIONS,
    SandboxStatus,
)
from tests.run.posttrain.rollout.program_attacks import (
    APPROXIMATIONS,
    CLOSE,
    FALSE_MODULES,
    FLOODS,
    FORGERIES,
    GAINED,
    INTRUSIONS,
    MODULES,
    SLOW_FLOODS,
    TESTS,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="isolation is Linux's")

CODE = "meshwright.run.posttrain.evaluation.verifiers.code_verifier:passes_tests"
LIMITS = VerifierLimits(deadline_s=20, memory_bytes=512 << 20, checks_per_process=1)
RIGHT = "def f(x):\n    return x * x"


class Outside:
    """What a program may not reach."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key = folder / "key"
        self.key.write_text("SECRET of a file")
        folder.chmod(0o777)
        self.key.chmod(0o666)
        self.sockets = [socket.create_server(("127.0.0.1", 0))]
        self.port = self.sockets[0].getsockname()[1]
        self.abstract = f"meshwright-{os.getpid()}"
        for address in (f"\0{self.abstract}", str(folder / "socket")):
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(address)
            listener.listen()
            self.sockets.append(listener)
        self.state = self.look()

    def look(self) -> tuple[object, ...]:
        """Return what a program could have changed."""
        status = self.key.stat()
        names = sorted(each.name for each in self.folder.iterdir())
        return self.key.read_text(), status.st_mode, status.st_mtime, names

    def fill(self, program: str) -> str:
        """Put what is to be attacked into a program."""
        return (
            program.replace("OUTSIDE", str(self.folder))
            .replace("PARENT", str(os.getpid()))
            .replace("PORT", str(self.port))
            .replace("ABSTRACT", self.abstract)
        )


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    # Not below pytest's own folder, which other users cannot reach anyway.
    made = Outside(tmp_path_factory.mktemp("outside"))
    yield made
    for each in made.sockets:
        each.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    os.environ["SECRET_OF_THE_TEST"] = "SECRET"
    try:
        with VerifierPool([CODE], workers=1, limits=LIMITS) as made:
            yield made
    finally:
        del os.environ["SECRET_OF_THE_TEST"]


def judge(pool: VerifierPool, program: str, tests: str) -> RewardComponent:
    payload = {"program": program, "tests": tests}
    check = VerifierJob(name="tests", verifier=CODE, payload=payload, is_final=True)
    (part,) = pool.verify([check])
    return part


@pytest.mark.parametrize("attack", FORGERIES)
def test_a_wrong_program_cannot_forge_a_verdict(pool: VerifierPool, attack: str) -> None:
    part = judge(pool, FORGERIES[attack], TESTS)
    assert part.value == 0.0, part.reason
    assert part.has_reward
    assert judge(pool, RIGHT, TESTS).value == 1.0


@pytest.mark.parametrize("attack", APPROXIMATIONS)
def test_a_wrong_number_cannot_pass_for_a_near_one(pool: VerifierPool, attack: str) -> None:
    assert judge(pool, APPROXIMATIONS[attack], CLOSE).value == 0.0
    assert judge(pool, "def f(x): return x * x + 1e-9", CLOSE).value == 1.0


@pytest.mark.parametrize("attack", FALSE_MODULES)
def test_a_program_cannot_replace_the_modules_of_its_tests(pool: VerifierPool, attack: str) -> None:
    assert judge(pool, FALSE_MODULES[attack], MODULES).value == 0.0
    assert judge(pool, FALSE_MODULES[attack], MODULES.partition("\n")[2]).value == 0.0


@pytest.mark.parametrize("attack", INTRUSIONS)
def test_a_program_gets_hold_of_nothing(pool: VerifierPool, outside: Outside, attack: str) -> None:
    part = judge(pool, outside.fill(INTRUSIONS[attack]), GAINED)
    assert (part.value, part.reason) == (1.0, "passed")
    assert outside.look() == outside.state
    assert not Path("/tmp/meshwright-attack").exists()


@pytest.fixture(scope="module")
def small_pool() -> Iterator[VerifierPool]:
    limits = VerifierLimits(deadline_s=4, memory_bytes=192 << 20, checks_per_process=1)
    with VerifierPool([CODE], workers=1, limits=limits) as made:
        yield made


@pytest.mark.parametrize(
    "flood",
    [pytest.param(each, marks=pytest.mark.slow if each in SLOW_FLOODS else ()) for each in FLOODS],
)
def test_a_program_that_takes_too_much_costs_its_own_verdict(
    small_pool: VerifierPool, flood: str
) -> None:
    assert judge(small_pool, FLOODS[flood], TESTS).value == 0.0
    assert judge(small_pool, RIGHT, TESTS).value == 1.0


def test_nothing_of_a_program_is_left_for_the_next(pool: VerifierPool) -> None:
    judge(pool, "open('left', 'w').write('x')\nopen('/dev/shm/left', 'w').write('x')", "")
    looks = "import os\ndef seen(): return os.listdir('.') + os.listdir('/dev/shm')"
    assert judge(pool, looks, "assert seen() == [], seen()").reason == "passed"


ESCAPES = """
import os, signal, time
def escape():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.execv("/bin/sleep", ["sleep", "MARK"])
        os._exit(0)
"""


@pytest.mark.parametrize("layers", [verifier_process._LAYERS, frozenset({"seccomp"})])
@pytest.mark.parametrize("hangs", [False, True])
def test_processes_that_leave_their_session_end_with_the_check(
    monkeypatch: pytest.MonkeyPatch, layers: frozenset[str], hangs: bool
) -> None:
    monkeypatch.setattr(verifier_process, "_LAYERS", layers)
    mark = f"{1000 + os.getpid()}.{len(layers)}{int(hangs)}"
    limits = VerifierLimits(deadline_s=3, processes=True, checks_per_process=1)
    program = ESCAPES.replace("MARK", mark) + "escape()\ntime.sleep(0.2)\n"
    with VerifierPool([CODE], workers=1, limits=limits) as pool:
        part = judge(pool, program + "while True: pass" * hangs, "")
        assert part.outcome == ("timeout" if hangs else "ok")
        assert not [pid for pid in _running() if mark in _command(pid)]


def _running() -> list[str]:
    return [each.name for each in Path("/proc").iterdir() if each.name.isdigit()]


def _command(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_nothing_is_left_of_a_sandbox_whose_owner_was_killed() -> None:
    code = (
        "import os, sys\n"
        "from meshwright.run.posttrain.rollout.verifiers import VerifierLimits\n"
        "from meshwright.run.posttrain.rollout.verifiers.verifier_process import VerifierProcess\n"
        f"process = VerifierProcess([{CODE!r}], VerifierLimits())\n"
        "print(process._folder.name, process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    folder, pid = done.stdout.split()
    for _ in range(400):
        if not Path(folder).exists() and not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.05)
    assert not Path(folder).exists()
    assert not Path(f"/proc/{pid}").exists()


def test_nothing_is_unprotected_on_a_recent_kernel(pool: VerifierPool) -> None:
    status = pool.sandbox_status
    if "Landlock" in status.missing or "seccomp" in status.missing:
        pytest.skip(f"this kernel has less: {status.missing}")
    assert status.find_unprotected() == []
    assert any(name.startswith("Landlock") for name in status.active)
    assert "unprotected" not in str(status)


KEPT = {
    "reads environments of all processes", "reads the parent's memory", "connects over TCP",
    "traces the parent", "writes outside", "changes a file outside", "signals the parent",
}  # fmt: skip


@pytest.mark.parametrize("layers", [("namespaces", "seccomp"), ("landlock", "seccomp", "user")])
def test_fewer_layers_still_protect(
    monkeypatch: pytest.MonkeyPatch, outside: Outside, layers: tuple[str, ...]
) -> None:
    monkeypatch.setattr(verifier_process, "_LAYERS", frozenset(layers))
    monkeypatch.setenv("SECRET_OF_THE_TEST", "SECRET")
    with VerifierPool([CODE], workers=1, limits=LIMITS) as pool:
        found = {name: judge(pool, outside.fill(INTRUSIONS[name]), GAINED) for name in KEPT}
        assert {name: part.reason for name, part in found.items()} == dict.fromkeys(KEPT, "passed")
        assert pool.sandbox_status.find_unprotected() == []
    assert outside.look() == outside.state


def test_temporary_files_may_lie_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    with VerifierPool([CODE], workers=1, limits=LIMITS) as pool:
        assert judge(pool, RIGHT, TESTS).value == 1.0
        assert pool.sandbox_status.find_unprotected() == []


def test_a_status_counts_what_protects_together() -> None:
    def unprotected(*active: str) -> list[str]:
        return SandboxStatus(active, {}).find_unprotected()

    assert unprotected() == list(PROTECTIONS)
    rest = ("network namespace", "subreaper", "seccomp", "rlimits")
    assert unprotected("Landlock 7", *rest) == ["secrets"], "capabilities read /proc all the same"
    assert unprotected("Landlock 7", "no capabilities", *rest) == []
    assert unprotected("PID namespace", "read-only mounts", *rest) == ["secrets"]
    assert unprotected("PID namespace", "own /proc", "read-only mounts", *rest) == []


def test_strict_isolation_refuses_to_run_without_protection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strict = VerifierLimits(isolation="strict", deadline_s=20)
    with VerifierPool([CODE], workers=1, limits=strict) as pool:
        assert judge(pool, RIGHT, TESTS).value == 1.0
    monkeypatch.setattr(verifier_process, "_LAYERS", frozenset({"namespaces"}))
    with pytest.raises(MissingDependency, match="nothing on this system protects system calls"):
        VerifierPool([CODE], workers=1, limits=strict)


def test_without_isolation_programs_are_judged_and_the_status_says_so() -> None:
    limits = VerifierLimits(isolation="none", deadline_s=20)
    with VerifierPool([CODE], workers=1, limits=limits) as pool:
        assert judge(pool, RIGHT, TESTS).value == 1.0
        assert pool.sandbox_status.find_unprotected() == [
            name for name in PROTECTIONS if name != "limits"
        ]


NOT_ROOT = """
import sys
sys.path[:0] = sys.argv[1:3]
from tests.run.posttrain.rollout.test_isolation import *
import tempfile
outside = Outside(Path(tempfile.mkdtemp()))
os.environ["SECRET_OF_THE_TEST"] = "SECRET"
failed = []
with VerifierPool([CODE], workers=1, limits=LIMITS) as pool:
    assert os.getuid() == 65534
    print(pool.sandbox_status)
    for name, program in INTRUSIONS.items():
        part = judge(pool, outside.fill(program), GAINED)
        if (part.value, part.reason) != (1.0, "passed"):
            failed.append((name, part.reason))
    for name, program in FORGERIES.items():
        if judge(pool, program, TESTS).value:
            failed.append((name, "forged"))
    assert pool.sandbox_status.find_unprotected() == [], pool.sandbox_status
assert outside.look() == outside.state
assert not failed, failed
"""


@pytest.mark.slow
def test_programs_are_as_isolated_where_the_user_is_not_root() -> None:
    interpreter = f"/usr/bin/python3.{sys.version_info.minor}"
    if os.getuid() or not Path(interpreter).exists() or not shutil.which("setpriv"):
        pytest.skip("needs root, setpriv and a Python that everybody may start")
    packages = sysconfig.get_paths()["purelib"]
    root = Path(__file__).resolve().parents[4]
    done = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", interpreter, "-c",
         NOT_ROOT, str(root / "src"), packages],
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(root)},
        cwd="/tmp", capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_verifiers_write_where_they_may_and_nowhere_else(tmp_path: Path) -> None:
    judges = "tests.run.posttrain.rollout.judges:touches"
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    allowed.mkdir()
    other.mkdir()
    limits = VerifierLimits(deadline_s=20, writable_paths=(str(allowed),))
    with VerifierPool([judges], workers=1, limits=limits) as pool:
        checks = [
            VerifierJob(name="touch", verifier=judges, payload={"path": str(folder / "mark")})
            for folder in (allowed, other)
        ]
        assert [part.outcome for part in pool.verify(checks)] == ["ok", "error"]
    assert (allowed / "mark").exists()
    assert not (other / "mark").exists()


VERIFIER_INTRUSIONS = {
    "environment": "got = open('/proc/PARENT/environ').read()",
    "memory": "open('/proc/PARENT/mem', 'rb')",
    "network": "import socket; socket.create_connection(('127.0.0.1', PORT), 1)",
    "socket file": "import socket; socket.socket(socket.AF_UNIX).connect('OUTSIDE/socket')",
    "file": "open('OUTSIDE/key', 'w')",
    "new file": "open('OUTSIDE/new', 'w')",
    "signal": "import os; os.kill(PARENT, 0)",
    "process": "import os; os.fork()",
}


@pytest.mark.parametrize(
    "layers",
    [("namespaces", "landlock", "seccomp", "user"), ("landlock", "seccomp", "user"),
     ("namespaces", "seccomp")],
)  # fmt: skip
def test_verifiers_that_run_a_program_themselves_get_hold_of_nothing_either(
    monkeypatch: pytest.MonkeyPatch, outside: Outside, layers: tuple[str, ...]
) -> None:
    judges = "tests.run.posttrain.rollout.judges:evaluates"
    monkeypatch.setattr(verifier_process, "_LAYERS", frozenset(layers))
    with VerifierPool([judges], workers=1, limits=LIMITS) as pool:
        checks = [
            VerifierJob(name=name, verifier=judges, payload={"code": outside.fill(code)})
            for name, code in VERIFIER_INTRUSIONS.items()
        ]
        found = {part.name: (part.value, part.reason) for part in pool.verify(checks)}
        assert {name for name, (value, _) in found.items() if value} == set(), found
    assert outside.look() == outside.state


def test_a_worker_cannot_answer_a_check_that_another_process_gets() -> None:
    judges = "tests.run.posttrain.rollout.judges:evaluates"
    forged = (
        "import json, os, struct\n"
        "body = json.dumps({'outcome': 'ok', 'value': 9.0, 'reason': 'forged'}).encode()\n"
        "for fd in range(3, 64):\n"
        "    try:\n"
        "        os.write(fd, 5 * (struct.pack('<I', len(body)) + body))\n"
        "    except OSError:\n"
        "        pass\n"
    )
    with VerifierPool([judges], workers=1, limits=LIMITS) as pool:
        codes = [forged, "got = 1", "got = 2"]
        checks = [VerifierJob(name="c", verifier=judges, payload={"code": code}) for code in codes]
        assert [part.reason for part in pool.verify(checks)][1:] == ["1", "2"]


def test_verifiers_use_the_network_where_they_may() -> None:
    judges = "tests.run.posttrain.rollout.judges:connects"
    with socket.create_server(("127.0.0.1", 0)) as server:
        check = VerifierJob(name="c", verifier=judges, payload={"port": server.getsockname()[1]})
        for allowed, outcome in ((False, "error"), (True, "ok")):
            limits = VerifierLimits(deadline_s=20, network=allowed)
            with VerifierPool([judges], workers=1, limits=limits) as pool:
                (part,) = pool.verify([check])
                assert part.outcome == outcome, part.reason
