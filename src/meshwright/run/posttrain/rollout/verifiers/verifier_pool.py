"""`VerifierPool`: verifiers in several bounded processes, which outlives the death of any of them.

    with VerifierPool(["mine.judges:exact"], workers=2) as pool:
        job = VerifierJob(name="exact", verifier="mine.judges:exact", payload={"answer": 3})
        (part,) = pool.verify([job])

A thread keeps each process and hands it checks. Whatever ends a process, every check gets exactly
one verdict: what was not answered goes to the next process, but the check that passed its deadline.
Where there can be none, because the pool was closed or no process starts, who waits hears of that.
"""

import math
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import count
from types import TracebackType
from typing import NamedTuple, Self

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.rollout.reward_component import RewardComponent, VerifierOutcome
from meshwright.run.posttrain.rollout.verifiers.verifier_job import (
    VerifierJob,
    VerifierLimits,
    VerifierStartError,
)
from meshwright.run.posttrain.rollout.verifiers.verifier_outcome import MAX_REWARD
from meshwright.run.posttrain.rollout.verifiers.verifier_process import (
    END_S,
    ChildExit,
    VerifierProcess,
    VerifierReply,
    require_json_payload,
)
from meshwright.spec.field_checks import check_integer, raise_problems
from meshwright.spec.name_suggestions import format_suggestion

_AT_ONCE = 64
"""Checks that go to a process in one message: quick ones would cost less than their messages."""


_LIMITS: tuple[VerifierOutcome, ...] = ("timeout", "memory", "output", "died")
"""How a check fails by what it runs."""


class RunningCheck(NamedTuple):
    """A check that a process has in hand."""

    job_name: str
    verifier: str
    pid: int
    started_s: float
    deadline_s: float


class _Work:
    """A check, and who waits for its verdict."""

    __slots__ = ("attempts", "check", "number", "verdict")

    def __init__(self, number: int, check: VerifierJob) -> None:
        self.number, self.check, self.attempts = number, check, 0
        self.verdict: Future[RewardComponent] = Future()
        # From here on nobody can cancel it, so that a verdict always finds its place.
        self.verdict.set_running_or_notify_cancel()


class VerifierPool:
    """Judges many checks at a time; any thread may use it."""

    def __init__(
        self, verifiers: Sequence[str], *, workers: int = 2, limits: VerifierLimits | None = None
    ) -> None:
        """Start one process, which shows that the verifiers load; others start when needed."""
        raise_problems(check_integer("workers", workers, most=1024))
        self.limits = limits or VerifierLimits()
        self._verifiers = tuple(dict.fromkeys(verifiers))
        first = VerifierProcess(self._verifiers, self.limits)
        self.fingerprints = dict(first.digests)
        """Of each verifier's module."""
        self.sandbox_status = first.status
        """What isolates the processes."""
        self._workers, self._waiting, self._numbers = workers, deque[_Work](), count()
        self._changed, self._closed = threading.Condition(), False
        self._counts: Counter[tuple[str, VerifierOutcome]] = Counter()
        self._under_way: dict[int, RunningCheck] = {}
        self._judging: dict[int, VerifierProcess] = {}
        """Processes with a batch, which are killed where the pool closes."""
        self._restarts = 0
        self._threads = [
            threading.Thread(
                target=self._keep,
                args=(slot, first if slot == 0 else None),
                name=f"verifier {slot}",
                daemon=True,
            )
            for slot in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def verify(self, checks: Sequence[VerifierJob]) -> list[RewardComponent]:
        """Judge checks; each is answered within its deadline once a process has it."""
        return [verdict.result() for verdict in self.submit(checks)]

    def submit(self, checks: Sequence[VerifierJob]) -> "list[Future[RewardComponent]]":
        """Queue checks; each verdict comes as a part of a reward, also where it fails."""
        for check in checks:
            self._refuse_unknown(check)
        with self._changed:
            if self._closed:
                raise _closed()
            queued = [_Work(next(self._numbers), check) for check in checks]
            self._waiting.extend(queued)
            self._changed.notify(len(queued))
        return [work.verdict for work in queued]

    @property
    def outcome_counts(self) -> dict[str, dict[VerifierOutcome, int]]:
        """How often each verifier ended how."""
        with self._changed:
            found: dict[str, dict[VerifierOutcome, int]] = {}
            for (verifier, outcome), number in sorted(self._counts.items()):
                found.setdefault(verifier, {})[outcome] = number
            return found

    @property
    def restarts(self) -> int:
        """Processes that had to be replaced because they died or were killed."""
        return self._restarts

    def running_checks(self) -> list[RunningCheck]:
        """Tell who is waited for at this moment, and until when."""
        with self._changed:
            return list(self._under_way.values())

    def close(self) -> None:
        """End all processes, also amid a check; who still waits for a verdict hears of it."""
        with self._changed:
            self._closed = True
            left = list(self._waiting)
            self._waiting.clear()
            for process in self._judging.values():
                process.kill()
            self._changed.notify_all()
        for work in left:
            work.verdict.set_exception(_closed())
        # Only a process that has not loaded its verifiers yet is waited for, until its deadline.
        patience_s = self.limits.start_s + END_S
        until_s = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        if late := [thread.name for thread in self._threads if thread.is_alive()]:
            what = f"have not ended within {patience_s:g} s, and are left behind"
            warnings.warn(f"threads of verifiers {what}: {', '.join(late)}", stacklevel=2)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _refuse_unknown(self, check: VerifierJob) -> None:
        if check.verifier not in self._verifiers:
            what = f"{check.verifier} is none of this pool's"
            fix = format_suggestion(check.verifier, self._verifiers)
            raise InputError([Problem(f"check {check.name}", what, fix)])
        require_json_payload(check.payload)

    def _taken(self) -> list[_Work]:
        """Wait for work and take a share of it; none where the pool closes."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            share = math.ceil(len(self._waiting) / self._workers)
            most = self.limits.checks_per_process or _AT_ONCE
            return [self._waiting.popleft() for _ in range(min(share, most))]

    def _keep(self, slot: int, process: VerifierProcess | None) -> None:
        """Keep one process, and give it work until the pool closes."""
        try:
            while batch := deque(self._taken()):
                while batch:
                    try:
                        process = process or VerifierProcess(self._verifiers, self.limits)
                        goes_on = self._pass(slot, process, batch)
                    except Exception as error:  # noqa: BLE001  raised where somebody waits for it
                        goes_on = False
                        for work in batch:
                            work.verdict.set_exception(error)
                        batch.clear()
                    if process is not None and not goes_on:
                        process.stop()
                        process = None
        finally:
            if process is not None:
                process.stop()

    def _pass(self, slot: int, process: VerifierProcess, batch: deque[_Work]) -> bool:
        """Let a process judge a batch; return whether it can go on.

        What is left in the batch afterwards has no verdict.
        """
        with self._changed:
            if self._closed:
                raise _closed()
            self._judging[slot] = process
        try:
            return self._judge(slot, process, batch)
        finally:
            with self._changed:
                del self._judging[slot]

    def _judge(self, slot: int, process: VerifierProcess, batch: deque[_Work]) -> bool:
        process.send([(work.number, work.check.verifier, work.check.payload) for work in batch])
        while batch:
            work = batch[0]
            self._note(slot, work.check, process.pid)
            answer = process.read_reply()
            self._note(slot, None, process.pid)
            if isinstance(answer, VerifierReply) and answer.number != work.number:
                # Only a verifier that writes to the socket itself can bring this about.
                answer = ChildExit("output", "it answered a check that it was not asked")
            if isinstance(answer, VerifierReply) and self._dies_again(work.check, answer):
                answer = ChildExit("died", answer.reason)
            if isinstance(answer, VerifierReply):
                self._settle(work, answer.outcome, answer.value, answer.reason, answer.took_s)
                batch.popleft()
                continue
            with self._changed:
                if self._closed:
                    raise _closed()
                self._restarts += 1
            # Before anybody hears of it: a verdict says that it was killed.
            process.stop()
            work.attempts += 1
            if answer.outcome != "died" or work.attempts > self.limits.retries:
                self._fail(work, answer, process.pid)
                batch.popleft()
            return False
        return True

    @staticmethod
    def _dies_again(check: VerifierJob, answer: VerifierReply) -> bool:
        """Say whether another process tries what one died of; a program has had its chance."""
        return answer.outcome == "died" and not check.is_final

    def _fail(self, work: _Work, gone: ChildExit, pid: int) -> None:
        verifier, deadline_s = work.check.verifier, self.limits.deadline_s
        if gone.outcome == "timeout":
            why = (
                f"gave no answer within its deadline of {deadline_s:g} s; process {pid} was killed"
            )
            self._settle(work, "timeout", 0.0, f"verifier {verifier} {why}", deadline_s)
            return
        tried = f" (process {pid}, try {work.attempts})"
        self._settle(work, gone.outcome, 0.0, f"verifier {verifier}: {gone.reason}{tried}", 0.0)

    def _settle(
        self, work: _Work, outcome: VerifierOutcome, value: float, reason: str, took_s: float
    ) -> None:
        check = work.check
        if abs(check.weight * value) > MAX_REWARD:
            reason = f"its score is {value:g}, which is too much with a weight of {check.weight:g}"
            outcome, value = "error", 0.0
        part = RewardComponent(
            name=check.name,
            value=value,
            weight=check.weight,
            reason=reason,
            verifier=check.verifier,
            fingerprint=self.fingerprints[check.verifier],
            outcome=outcome,
            duration_s=took_s,
            # A verifier that raises has a fault of its own, whatever it was to run.
            is_final=check.is_final and outcome in _LIMITS,
        )
        with self._changed:
            self._counts[check.verifier, outcome] += 1
        work.verdict.set_result(part)

    def _note(self, slot: int, check: VerifierJob | None, pid: int) -> None:
        with self._changed:
            if check is None:
                self._under_way.pop(slot, None)
            else:
                self._under_way[slot] = RunningCheck(
                    check.name, check.verifier, pid, time.monotonic(), self.limits.deadline_s
                )


def _closed() -> VerifierStartError:
    return VerifierStartError("the verifiers were closed")


def describe_failures(counts: dict[str, dict[VerifierOutcome, int]]) -> list[str]:
    """Say in words which verifiers failed, and how often."""
    lines = []
    for verifier, outcomes in counts.items():
        failed = {outcome: number for outcome, number in outcomes.items() if outcome != "ok"}
        if failed:
            how = ", ".join(f"{number:,} × {outcome}" for outcome, number in failed.items())
            lines.append(f"{verifier}: {how}, of {sum(outcomes.values()):,} checks")
    return lines
