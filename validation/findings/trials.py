"""The trials: faults planted in one rank, faults that only several ranks show, labelled traces."""

import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from meshwright.errors import DamagedFile
from meshwright.observe.findings import RankContext, find_inefficiencies
from meshwright.observe.findings.job.job_registry import RANK_PATTERNS
from meshwright.predict.event_sim.step_simulation import simulate_step
from meshwright.spec.layout import ScheduleKind
from meshwright.spec.model import build_gpt
from meshwright.timeline.readers.trace_folder import iter_timelines
from meshwright.timeline.timeline import Timeline
from validation.findings.clean_jobs import clean_job, run_of
from validation.findings.faults import FAULTS, planted
from validation.findings.planting import Planter
from validation.findings.scores import Trial, names_of, trial

LABELS = Path(__file__).parent / "labels.toml"
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
TIMES = (1.5, 3.0)
"""Faults cost so many times the least share that is told."""
WAITS = ("item-sync", "nonzero-sync", "blocking-copy", "explicit-synchronize", "barrier-in-loop")
_EQUAL_STAGES = build_gpt("equal", layers=48, hidden=4096, heads=32, vocab=8)


def planted_trials(where: str, base: Timeline, seeds: Iterable[int]) -> Iterator[Trial]:
    """Every fault in one base, at several sizes; and the base itself."""
    own = names_of(find_inefficiencies([base]))
    yield Trial(where, frozenset(), own, own)
    own |= near(base)
    steps = sum(name.startswith("ProfilerStep") for name in base.string_column("name").values)
    for name, fault in FAULTS.items():
        if name in own or steps < fault.least_steps or not _fits(name, base, where):
            continue
        for seed in seeds:
            for factor in TIMES:
                part, cost = planted(base, name, factor, seed)
                found = find_inefficiencies([part])
                told = next((one.gpu_share for one in found if one.name == name), None)
                costs = None if told is None else (cost / RankContext(part).window_ns, told)
                yield trial(where, {name}, own | set(fault.also), found, costs)


def near(part: Timeline) -> frozenset[str]:
    """Patterns that a timeline shows at half of what is told: a fault may lift them over it."""
    rank = RankContext(part)
    return frozenset(
        name
        for name, (pattern, detector) in RANK_PATTERNS.items()
        if (hit := detector(rank)) is not None
        and hit.cost_ns is not None
        and hit.cost_ns >= 0.5 * pattern.min_cost * rank.window_ns
    )


def _fits(name: str, base: Timeline, where: str) -> bool:
    """Whether a fault can be planted in a base at all."""
    if where == "simulated":
        return True
    if name in ("slow-attention-backend", "fp32-gemms"):
        return '"computeMajor":9' in base.metadata.get("devices", "").replace(" ", "")
    if name in WAITS:
        return bool(Planter(base).ahead.sum() >= 20)
    # These change what is there, by the layout of the simulated job.
    return name not in ("communication-contention", "memory-fragmentation", "fp32-reduction")


def job_trials(seeds: Iterable[int]) -> Iterator[Trial]:
    """Faults that only several ranks show, in simulated jobs; and clean ones."""
    hidden = ("exposed-all-reduce", "host-bound")
    for seed in seeds:
        yield _job("", (), seed)
        for slow in (1.05, 1.2):
            yield _job(
                "straggler-slow-kernels", hidden, seed,
                compute=lambda rank, _, by=slow: by if rank == 2 else 1.0,
            )  # fmt: skip
        yield _job(
            "straggler-more-work", hidden, seed,
            more_work=lambda rank, _: 1.25 if rank == 1 else 1.0,
        )  # fmt: skip
        for late in (2_500_000, 10_000_000):
            yield _job(
                "straggler-host-bound", hidden, seed,
                pause=lambda rank, _, by=late: by if rank == 3 else 0,
            )  # fmt: skip
            yield _job(
                "straggler-data-wait", (*hidden, "data-loader-stall"), seed,
                pause=lambda rank, _, by=late: by if rank == 0 else 0, pause_name=LOADER,
            )  # fmt: skip
        yield _job(
            "rotating-stragglers", hidden, seed,
            pause=lambda rank, step: 10_000_000 if rank == step % 4 else 0,
        )  # fmt: skip
        yield _job("low-bus-bandwidth", hidden, seed, transfer=lambda _rank, _step: 5.0)
        yield _job(
            "all-to-all-imbalance", ("exposed-all-to-all", "low-bus-bandwidth"), seed,
            collective="all_to_all",
            load=lambda rank: 2.0 if rank == 1 else 1.0,
        )  # fmt: skip
        yield _job(
            "kernel-mismatch", ("straggler-slow-kernels", "straggler-more-work", *hidden), seed,
            compute=lambda rank, _: 1.15 if rank == 3 else 1.0,
            rename=lambda rank, name: f"fallback_{name}" if rank == 3 else name,
        )  # fmt: skip
        yield _slow_link((*hidden, "low-bus-bandwidth"), seed)
        yield from _pipelines(seed)


def _job(name: str, allowed: tuple[str, ...], seed: int, **how: Any) -> Trial:
    found = find_inefficiencies(clean_job(ranks=4, seed=seed, **how))
    return trial("simulated", {name} - {""}, allowed, found)


def _once(_rank: int, _step: int) -> float:
    return 1.0


def _twice(_rank: int, _step: int) -> float:
    return 2.0


def _slow_link(allowed: tuple[str, ...], seed: int) -> Trial:
    """Three groups of two ranks, of which one transfers at half the speed."""
    parts = [
        part
        for at, slower in enumerate((_once, _once, _twice))
        for part in clean_job(
            ranks=2, seed=seed, first_rank=2 * at, group=f"dp {at}",
            transfer=slower,
        )
    ]  # fmt: skip
    return trial("simulated", {"slow-link"}, allowed, find_inefficiencies(parts))


def _pipelines(seed: int) -> Iterator[Trial]:
    schedules: tuple[tuple[ScheduleKind, int, bool], ...] = (
        ("gpipe", 4, True), ("1f1b", 8, True), ("1f1b", 64, False),
    )  # fmt: skip
    for kind, batch, there in schedules:
        run = run_of(_EQUAL_STAGES, kind, batch=batch, pp=4)
        step = simulate_step(run, jitter_cv=0.02, seed=seed)
        truth = {"pipeline-bubble"} if there else set()
        allowed = {"exposed-send-receive", "host-bound"}
        yield trial(
            "simulated", truth, allowed, find_inefficiencies(step.build_timeline().split_by_rank())
        )


def labels() -> list[dict[str, Any]]:
    """What people saw in real traces: path, set, present, open and the reason."""
    found: list[dict[str, Any]] = tomllib.loads(LABELS.read_text(encoding="utf-8"))["trace"]
    return found


def labelled_trials(folder: Path, which: str) -> Iterator[Trial]:
    """Real traces of one set of labels; patterns that are open are not counted."""
    for label in labels():
        if label["set"] != which:
            continue
        parts: list[Timeline] = []
        try:
            parts.extend(iter_timelines(folder / label["path"]))
        except DamagedFile as damage:
            if not parts and isinstance(damage.readable, Timeline):
                parts.append(damage.readable)
        yield trial(
            label["path"], label["present"], label.get("open", ()), find_inefficiencies(parts)
        )
