"""Every check gets exactly one verdict, whatever its verifier does to its process."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meshwright.errors import InputError
from meshwright.run.posttrain.rollout.reward_component import RewardComponent
from meshwright.run.posttrain.rollout.verifiers import (
    VerifierJob,
    VerifierLimits,
    VerifierPool,
    VerifierStartError,
    describe_failures,
)

HOME = "tests.run.posttrain.rollout.judges"
NAMES = (
    "double", "slow", "hangs", "raises", "leaves", "dies", "dies_once", "eats", "floods", "writes",
    "not_a_number", "a_text", "huge", "surroundings", "starts_another", "who",
)  # fmt: skip
LIMITS = VerifierLimits(deadline_s=0.5)
# Where a check is to be answered, however slow the machine.
PATIENT = VerifierLimits(deadline_s=60)


def check(function: str, **job: Any) -> VerifierJob:
    return VerifierJob(name=function, verifier=f"{HOME}:{function}", payload=job)


def pool_of(limits: VerifierLimits = LIMITS, workers: int = 1) -> VerifierPool:
    return VerifierPool([f"{HOME}:{name}" for name in NAMES], workers=workers, limits=limits)


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with pool_of(PATIENT) as made:
        yield made


def judged(pool: VerifierPool, function: str, **job: Any) -> RewardComponent:
    (part,) = pool.verify([check(function, **job)])
    return part


def test_a_verdict_says_who_judged_and_why(pool: VerifierPool) -> None:
    part = judged(pool, "double", number=4)
    assert (part.value, part.reason, part.outcome) == (8.0, "twice 4", "ok")
    assert part.verifier == f"{HOME}:double"
    assert len(part.fingerprint) == 16
    assert part.duration_s >= 0


@pytest.mark.parametrize(
    ("function", "outcome", "reason"),
    [
        ("raises", "error", "RuntimeError: no such answer"),
        ("leaves", "error", "SystemExit: 3"),
        ("not_a_number", "error", "its score is nan"),
        ("a_text", "error", "TypeError: it returned a str, not a score, or a score and a reason"),
        ("huge", "error", "its score is 1e+39, and float32 ends at 3.4e+38"),
        ("eats", "memory", "it ran out of memory"),
    ],
)
def test_a_verifier_that_fails_is_told_apart(
    pool: VerifierPool, function: str, outcome: str, reason: str
) -> None:
    before = pool.restarts
    part = judged(pool, function)
    assert (part.outcome, part.reason, part.value) == (outcome, reason, 0.0)
    assert judged(pool, "double", number=1).value == 2.0
    assert pool.restarts == before, "the process goes on"


def test_a_score_whose_weight_makes_it_too_much_has_failed(pool: VerifierPool) -> None:
    heavy = [
        msgspec.structs.replace(check("double", number=1e30), weight=weight)
        for weight in (1e9, -1e9, 1e8)
    ]
    parts = pool.verify(heavy)
    assert [part.outcome for part in parts] == ["error", "error", "ok"]
    assert parts[0].reason == "its score is 2e+30, which is too much with a weight of 1e+09"
    assert [part.value for part in parts] == [0.0, 0.0, 2e30]


def test_a_hung_verifier_is_named_with_its_deadline_and_the_next_check_is_judged() -> None:
    with pool_of() as pool:
        pids = []
        hung = pool.submit([check("hangs")])[0]
        while not (under_way := pool.running_checks()):
            time.sleep(0.001)
        pids.append(under_way[0].pid)
        assert (under_way[0].verifier, under_way[0].deadline_s) == (f"{HOME}:hangs", 0.5)
        part = hung.result(30)
        assert part.outcome == "timeout"
        assert f"{HOME}:hangs" in part.reason
        assert "deadline of 0.5 s" in part.reason
        assert f"process {pids[0]} was killed" in part.reason
        with pytest.raises(ProcessLookupError):
            os.kill(pids[0], 0)
        assert judged(pool, "double", number=3).value == 6.0
        assert pool.outcome_counts == {
            f"{HOME}:double": {"ok": 1},
            f"{HOME}:hangs": {"timeout": 1},
        }
        assert describe_failures(pool.outcome_counts) == [f"{HOME}:hangs: 1 × timeout, of 1 checks"]


def test_a_hung_check_takes_none_of_those_queued_behind_it_along() -> None:
    with pool_of() as pool:
        checks = [check("double", number=place) for place in range(20)]
        checks.insert(7, check("hangs"))
        parts = pool.verify(checks)
    assert [part.outcome for part in parts].count("ok") == 20
    assert parts[7].outcome == "timeout"
    assert [part.value for part in parts if part.outcome == "ok"] == [2.0 * n for n in range(20)]


def test_killing_processes_loses_and_doubles_no_verdict() -> None:
    with pool_of(PATIENT, workers=2) as pool:
        checks = [check("slow", number=place, seconds=0.002) for place in range(120)]
        verdicts = [*pool.submit(checks[:50]), *pool.submit(checks[50:])]
        killed: set[int] = set()
        while len(killed) < 3 and not all(verdict.done() for verdict in verdicts):
            for each in pool.running_checks():
                if each.pid not in killed and len(killed) < 3:
                    os.kill(each.pid, signal.SIGKILL)
                    killed.add(each.pid)
            time.sleep(0.005)
        parts = [verdict.result(60) for verdict in verdicts]
        assert [part.value for part in parts] == [float(place) for place in range(120)]
        assert pool.outcome_counts == {f"{HOME}:slow": {"ok": 120}}
        assert 1 <= pool.restarts <= len(killed)


def test_a_check_whose_process_died_is_given_to_another(tmp_path: Path) -> None:
    limits = VerifierLimits(deadline_s=60, writable_paths=(str(tmp_path),))
    with pool_of(limits) as pool:
        assert judged(pool, "dies_once", mark=str(tmp_path / "mark")).outcome == "ok"
        part = judged(pool, "dies")
        assert part.outcome == "died"
        assert "ended with code 7" in part.reason
        assert "try 3" in part.reason
        assert pool.restarts == 4


def test_answers_and_files_are_bounded() -> None:
    with pool_of(VerifierLimits(deadline_s=60, output_bytes=10_000)) as pool:
        assert judged(pool, "floods", bytes=5_000).outcome == "ok"
        part = judged(pool, "floods", bytes=50_000)
        assert part.outcome == "output"
        assert "at most 10,000 are read" in part.reason
        assert judged(pool, "writes", bytes=5_000).outcome == "ok"
        assert "File too large" in judged(pool, "writes", bytes=50_000).reason


def test_a_verifier_inherits_neither_secrets_nor_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SECRET_KEY_OF_THE_TEST", "s3cret")
    with (tmp_path / "open").open("w") as ours, pool_of(PATIENT) as pool:
        os.set_inheritable(ours.fileno(), True)
        reason = judged(pool, "surroundings").reason
    assert "SECRET" not in reason
    assert str(tmp_path) not in reason
    assert str(Path.cwd()) not in reason
    _, files, _ = eval(reason)
    assert len(files) <= 6, "its standard files, the socket, and the listing itself"


def test_what_a_hung_verifier_started_ends_with_it() -> None:
    with pool_of(VerifierLimits(deadline_s=0.2, processes=True)) as pool:
        pending = pool.submit([check("starts_another")])[0]
        while not (under_way := pool.running_checks()):
            time.sleep(0.001)
        group = under_way[0].pid
        assert pending.result(30).outcome == "timeout"
    # The system takes its time to end what was killed; a sleep of a minute would outlast this.
    for _ in range(1000):
        if not (left := _members(group)):
            break
        time.sleep(0.01)
    assert left == []


def _members(group: int) -> list[str]:
    pids = [each.name for each in Path("/proc").iterdir() if each.name.isdigit()]
    return [pid for pid in pids if (stat := _stat(pid))[2] == str(group) and stat[0] != "Z"]


def _stat(pid: str) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z", "0", "0"]


def test_many_threads_share_a_pool() -> None:
    with pool_of(PATIENT, workers=2) as pool, ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda number: judged(pool, "double", number=number).value, range(40))
        assert list(found) == [2.0 * number for number in range(40)]


def test_a_process_for_each_check_where_models_wrote_what_it_runs() -> None:
    limits = VerifierLimits(deadline_s=60, checks_per_process=1)
    with pool_of(limits) as pool:
        pids = {judged(pool, "who").reason for _ in range(2)}
        assert len(pids) == 2
        assert pool.restarts == 0


def test_a_pool_can_be_made_in_a_thread_that_ends() -> None:
    made: list[VerifierPool] = []
    thread = threading.Thread(target=lambda: made.append(pool_of(PATIENT)))
    thread.start()
    thread.join()
    with made[0] as pool:
        assert judged(pool, "double", number=1).value == 2.0


def test_a_verifier_that_cannot_be_loaded_is_refused_at_once() -> None:
    with pytest.raises(InputError, match=r"no_such: cannot be loaded: AttributeError"):
        VerifierPool([f"{HOME}:no_such"])
    with pytest.raises(InputError, match="name it as module:function"):
        VerifierPool(["nowhere.at.all:judge"])


def test_checks_that_cannot_be_judged_are_refused(pool: VerifierPool) -> None:
    with pytest.raises(InputError, match="is none of this pool's"):
        pool.submit([VerifierJob(name="x", verifier="other:judge", payload={})])
    with pytest.raises(InputError, match="JSON cannot carry it"):
        pool.submit([check("double", number=object())])


def test_a_pool_closes_amid_checks_that_hang() -> None:
    pool = pool_of(PATIENT, workers=2)
    verdicts = pool.submit([check("hangs") for _ in range(9)])
    while len(under_way := pool.running_checks()) < 2:
        time.sleep(0.001)
    began_s = time.monotonic()
    pool.close()
    assert time.monotonic() - began_s < PATIENT.deadline_s / 2
    for verdict in verdicts:
        with pytest.raises(VerifierStartError, match="closed"):
            verdict.result(0)
    for each in under_way:
        with pytest.raises(ProcessLookupError):
            os.kill(each.pid, 0)
    assert pool.restarts == 0, "nobody takes it for a death"


def test_checks_for_which_no_process_starts_are_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pool_of(VerifierLimits(deadline_s=60, checks_per_process=1)) as pool:
        assert judged(pool, "double", number=1).value == 2.0
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
        with pytest.raises(VerifierStartError):
            judged(pool, "dies")
        (verdict,) = pool.submit([check("double", number=2)])
        with pytest.raises(VerifierStartError, match="cannot start a process for verifiers"):
            verdict.result(30)
        monkeypatch.undo()
        assert judged(pool, "double", number=3).value == 6.0, "the pool goes on"


def test_a_closed_pool_says_so() -> None:
    pool = pool_of(PATIENT)
    pool.close()
    with pytest.raises(VerifierStartError, match="closed"):
        pool.submit([check("double", number=1)])
