"""`VerifierJob` and `VerifierLimits`: what is to be judged, and what judging may take."""

from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from meshwright.errors import MeshwrightError
from meshwright.spec.field_checks import FieldChecker

IsolationLevel = Literal["strict", "best-effort", "none"]
ISOLATION_LEVELS = get_args(IsolationLevel)
_MIB = 1 << 20


class VerifierStartError(MeshwrightError):
    """A verifier's process cannot be started, or the pool was closed under a check."""


class VerifierJob(msgspec.Struct, frozen=True, kw_only=True):
    """One judgement that a reward needs."""

    name: str
    """The part of the reward that it becomes."""
    verifier: str
    """`module:function`; it takes `payload`, and returns a score, or a score and a reason."""
    payload: dict[str, Any]
    """Plain values that JSON can carry."""
    weight: float = 1.0
    is_final: bool = False
    """Whether a failure is a verdict, of 0: what hangs, dies or floods is the model's program."""


class VerifierLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one process of a verifier may take."""

    deadline_s: float = 5.0
    """For one check; then its process is killed, and the check counted as a timeout."""
    start_s: float = 30.0
    """For starting a process and loading the verifiers."""
    memory_bytes: int = 1024 * _MIB
    """Address space, the interpreter's own included."""
    output_bytes: int = 1 * _MIB
    """Of an answer with its reason, and of each file that is written."""
    processes: bool = False
    """Whether it may start processes and threads."""
    network: bool = False
    """Whether it may use the network. Programs that a model wrote never may."""
    writable_paths: tuple[str, ...] = ()
    """Files and folders beside its own that it may write. Programs may write their folder only."""
    isolation: IsolationLevel = "best-effort"
    """How processes are isolated: as far as this kernel allows, or not at all; `strict` refuses to
    run where something stays unprotected."""
    checks_per_process: int = 0
    """Start anew after so many; 1 for verifiers that run what a model wrote, 0 never."""
    retries: int = 2
    """How often a check is given to another process where one died of something else."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.positive(deadline_s=self.deadline_s, start_s=self.start_s)
        bounds.count(1, memory_bytes=self.memory_bytes, output_bytes=self.output_bytes)
        bounds.one_of("isolation", self.isolation, ISOLATION_LEVELS)
        for path in self.writable_paths:
            if not Path(path).exists():
                bounds.add("writable_paths", f"there is no {path}", "create it")
        bounds.count(0, checks_per_process=self.checks_per_process, retries=self.retries)
        bounds.raise_problems()
