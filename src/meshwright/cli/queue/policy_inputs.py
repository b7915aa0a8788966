"""Which policies can say anything about some jobs, and which lack what they go by."""

from collections.abc import Sequence

from meshwright.cli.queue.jobs import QueueWorkload
from meshwright.errors import InputError, Problem
from meshwright.policy.job_queue.policy_registry import (
    POLICIES,
    build_unknown_policy_problem,
    list_missing_inputs,
)

_FIXES = {
    "deadlines": "give them: --deadline-factor 2, a column deadline_s, or --column deadline_s=NAME",
    "priorities": "give them: --qos-priorities high=10, a column priority, or --column "
    "priority=NAME",
}


def parse_policies(text: str, flag: str) -> list[str]:
    """Read names of policies; `all` are all there are."""
    if text == "all":
        return list(POLICIES)
    names = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    problems = [build_unknown_policy_problem(name, flag) for name in names if name not in POLICIES]
    if problems:
        raise InputError(problems)
    if not names:
        raise InputError([Problem(flag, "names none", "use all")])
    return names


def require_inputs(names: Sequence[str], read: QueueWorkload, flag: str) -> None:
    """Refuse policies that would be another one, as no job tells what they go by."""
    problems = [
        Problem(
            f"{flag} {name}",
            f"no job has {_one(missing)}, without which it is FIFO",
            _FIXES[missing],
        )
        for name in names
        for missing in list_missing_inputs(name, read.requests)
    ]
    if problems:
        raise InputError(problems)


def describe_gaps(names: Sequence[str], read: QueueWorkload) -> list[str]:
    """Say what policies do with jobs that lack what they go by."""
    notes = []
    count = len(read.requests)
    without = sum(ask.deadline_s is None for ask in read.requests)
    if "edf" in names and 0 < without < count:
        notes.append(f"edf: {without:,} of {count:,} jobs have no deadline and come last")
    if "elastic" in names and all(ask.min_gpus is None for ask in read.requests):
        notes.append("elastic: every job has one size; --elastic-range MIN:MAX lets sizes change")
    return notes


def _one(missing: str) -> str:
    return {"deadlines": "a deadline", "priorities": "a priority of its own"}[missing]
