"""Programs that a model wrote, judged by tests in bounded child processes."""

import re
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from meshwright.run.posttrain.rollout.verifiers.sandbox.sandbox_config import SandboxStatus
from meshwright.run.posttrain.rollout.verifiers.verifier_job import (
    IsolationLevel,
    VerifierJob,
    VerifierLimits,
)
from meshwright.run.posttrain.rollout.verifiers.verifier_pool import VerifierPool

_JUDGE = "meshwright.run.posttrain.evaluation.verifiers.code_verifier:passes_tests"
_FENCED = re.compile(r"^```[^\n`]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


class CodeSubmission(NamedTuple):
    """What is to be run."""

    code: str
    tests: str


class SubmissionResult(NamedTuple):
    """What became of it."""

    passed: bool
    reason: str


class CodeRunner(Protocol):
    """Runs programs with their tests, and comes back whatever they do."""

    def run(self, programs: Sequence[CodeSubmission]) -> list[SubmissionResult]:
        """Return what became of each."""


class SubprocessCodeRunner:
    """Runs each program in processes of its own, which are isolated and ended at a deadline."""

    def __init__(
        self,
        *,
        deadline_s: float = 5.0,
        memory_bytes: int = 1 << 30,
        workers: int = 2,
        isolation: IsolationLevel = "best-effort",
    ) -> None:
        self._workers = workers
        self._limits = VerifierLimits(
            deadline_s=deadline_s,
            memory_bytes=memory_bytes,
            checks_per_process=1,
            retries=0,
            isolation=isolation,
        )
        self.sandbox_status: SandboxStatus | None = None
        """What isolates programs; None before the first one runs."""

    def run(self, programs: Sequence[CodeSubmission]) -> list[SubmissionResult]:
        """Return what became of each."""
        checks = [
            VerifierJob(
                name="tests",
                verifier=_JUDGE,
                payload={"program": one.code, "tests": one.tests},
                is_final=True,
            )
            for one in programs
        ]
        if not checks:
            return []
        with VerifierPool([_JUDGE], workers=self._workers, limits=self._limits) as pool:
            self.sandbox_status = pool.sandbox_status
            parts = pool.verify(checks)
        return [
            SubmissionResult(
                part.outcome == "ok" and part.value == 1.0,
                part.reason if part.outcome == "ok" else f"{part.outcome}: {part.reason}",
            )
            for part in parts
        ]


def extract_code(answer: str, prefix: str = "") -> str:
    """Return the program within an answer: its first fenced block, or all of it."""
    found = _FENCED.search(answer)
    return prefix + (found.group(1) if found else answer)
