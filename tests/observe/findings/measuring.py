"""Measures how well patterns are found: on planted faults, and on real traces labelled by hand.

python -m tests.observe.findings.measuring      prints the table of the documentation
"""

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshwright.errors import DamagedFile
from meshwright.observe.finding import Finding
from meshwright.observe.findings import Rank, find, patterns
from meshwright.observe.findings.registry import RANK_PATTERNS
from meshwright.observe.findings.stepping import CHANGE_LEAST, change, outliers
from meshwright.predict.simulate import simulate_step
from meshwright.spec.layout import ScheduleKind
from meshwright.timeline.readers.traces import read_each
from meshwright.timeline.timeline import Timeline
from tests.observe.findings.clean_jobs import clean_job
from tests.observe.findings.faults import FAULTS, planted
from tests.predict.runs import run_of

LABELS = Path(__file__).parent / "labels.toml"
REAL_BASES = (
    "modded-nanogpt/ab-2025-10-31/current.json.gz",
    "hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
)
HELD_OUT = (
    "hta/trace_diff/control/control.json.gz",
    "tracelens/mi300/resnet_act_checkpoint.json.gz",
    "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
)
"""Neither detectors nor planting were changed after faults had been planted in these."""
LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


class Trial(NamedTuple):
    """A run with something known in it."""

    where: str
    """`simulated` or `real`: what the fault was planted in; `labelled`: by hand."""
    truth: frozenset[str]
    """Patterns that are there."""
    allowed: frozenset[str]
    """Patterns that may be told besides: the fault's nature, or the base's own."""
    found: frozenset[str]
    cost: tuple[float, float] | None = None
    """Planted and told, as parts of the time."""


class Score(NamedTuple):
    """How often a pattern was right."""

    true: int
    false: int
    missed: int

    @property
    def precision(self) -> float | None:
        """Of those told, how many are there."""
        told = self.true + self.false
        return self.true / told if told else None

    @property
    def recall(self) -> float | None:
        """Of those there, how many were told."""
        there = self.true + self.missed
        return self.true / there if there else None


def score(name: str, trials: Iterable[Trial]) -> Score:
    """Count one pattern over trials."""
    true = false = missed = 0
    for trial in trials:
        if name in trial.truth:
            true += name in trial.found
            missed += name not in trial.found
        else:
            false += name in trial.found and name not in trial.allowed
    return Score(true, false, missed)


def total(trials: Iterable[Trial]) -> Score:
    """Count all patterns over trials."""
    group = list(trials)
    every = [score(one.name, group) for one in patterns()]
    return Score(*(sum(column) for column in zip(*every, strict=True)))


def names(found: Iterable[Finding]) -> frozenset[str]:
    """The patterns that were told."""
    return frozenset(one.name for one in found)


def planted_trials(
    bases: Iterable[tuple[str, Timeline]], seeds: Iterable[int], times: Iterable[float]
) -> Iterator[Trial]:
    """Every fault in every base, at several sizes."""
    for where, base in bases:
        own = names(find([base])) | near(base)
        yield Trial(where, frozenset(), own, names(find([base])))
        steps = len([1 for name in base.strings("name").values if name.startswith("ProfilerStep")])
        for name, fault in FAULTS.items():
            if name in own or steps < fault.least_steps or not _fits(name, base, where):
                continue
            for seed in seeds:
                for factor in times:
                    part, cost = planted(base, name, factor, seed)
                    found = find([part])
                    told = next((one for one in found if one.name == name), None)
                    share = None
                    if told is not None and told.gpu_share is not None:
                        window = _window(part)
                        share = (cost / window, told.gpu_share)
                    yield Trial(
                        where, frozenset({name}), own | set(fault.also), names(found), share
                    )


def near(part: Timeline) -> frozenset[str]:
    """Patterns that a timeline shows at half of what is told: a fault may lift them over it."""
    rank = Rank(part)
    return frozenset(
        name
        for name, (pattern, detector) in RANK_PATTERNS.items()
        if (hit := detector(rank)) is not None
        and hit.cost_ns is not None
        and hit.cost_ns >= 0.5 * pattern.least_share * rank.window_ns
    )


def _window(part: Timeline) -> int:
    return Rank(part).window_ns


def _fits(name: str, base: Timeline, where: str) -> bool:
    """Whether a fault can be planted in a base at all."""
    if where == "simulated":
        return True
    devices = base.metadata.get("devices", "")
    if name in ("slow-attention-backend", "fp32-products"):
        return '"computeMajor":9' in devices.replace(" ", "")
    # These change what is there, by the layout of the simulated job.
    return name not in ("communication-slows-compute", "memory-fragmentation", "fp32-reduction")


def job_trials(seeds: Iterable[int]) -> Iterator[Trial]:
    """Faults that only several ranks show, in simulated jobs, and clean ones."""
    for seed in seeds:
        yield _job("", (), seed)
        hidden = ("exposed-all-reduce", "late-host")
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
                "straggler-late-host", hidden, seed,
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
            "other-kernels", ("straggler-slow-kernels", "straggler-more-work", *hidden), seed,
            compute=lambda rank, _: 1.15 if rank == 3 else 1.0,
            rename=lambda rank, name: f"fallback_{name}" if rank == 3 else name,
        )  # fmt: skip
        groups = [
            clean_job(ranks=2, seed=seed, first_rank=2 * at, group=f"dp {at}", transfer=slower)
            for at, slower in enumerate((_once, _once, _twice))
        ]  # fmt: skip
        found = names(find(part for job in groups for part in job))
        allowed = frozenset((*hidden, "low-bus-bandwidth"))
        yield Trial("simulated", frozenset({"slow-link"}), allowed, found)
        schedules: tuple[tuple[ScheduleKind, int, bool], ...] = (
            ("gpipe", 4, True), ("1f1b", 8, True), ("1f1b", 64, False),
        )  # fmt: skip
        for kind, batch, there in schedules:
            step = simulate_step(run_of(kind, batch=batch, pp=4), jitter_cv=0.02, seed=seed)
            truth = frozenset({"pipeline-bubble"} if there else ())
            allowed = frozenset({"exposed-send-receive", "late-host"})
            yield Trial("simulated", truth, allowed, names(find(step.timeline().by_rank())))


def _once(_rank: int, _step: int) -> float:
    return 1.0


def _twice(_rank: int, _step: int) -> float:
    return 2.0


def _job(name: str, allowed: tuple[str, ...], seed: int, **how: Any) -> Trial:
    found = find(clean_job(ranks=4, seed=seed, **how))
    return Trial("simulated", frozenset({name} - {""}), frozenset(allowed), names(found))


def labelled_trials(traces: Path) -> Iterator[tuple[str, Trial]]:
    """Real traces with labels by hand; patterns that are open are not counted."""
    for label in tomllib.loads(LABELS.read_text())["trace"]:
        parts: list[Timeline] = []
        try:
            parts.extend(read_each(traces / label["path"]))
        except DamagedFile as damage:
            if not parts and isinstance(damage.kept, Timeline):
                parts.append(damage.kept)
        trial = Trial(
            "labelled",
            frozenset(label["present"]),
            frozenset(label.get("open", ())),
            names(find(parts)),
        )
        yield label["path"], trial


def simulated_bases() -> list[tuple[str, Timeline]]:
    """Clean simulated ranks, short and long."""
    return [
        ("simulated", clean_job(steps=steps, seed=seed)[0]) for steps, seed in ((6, 1), (24, 2))
    ]


def real_bases(traces: Path) -> list[tuple[str, Timeline]]:
    """Real ranks that show little of their own."""
    return [("real", next(iter(read_each(traces / name)))) for name in REAL_BASES]


def false_alarms(runs: int = 1000) -> Iterator[tuple[str, int, float, float]]:
    """How often step times without a fault are told as outliers, and as changed for good.

    For each kind of noise: its name, the number of steps, both rates. Only a rise of 3 % counts as
    a change, as in the detector.
    """
    random = np.random.default_rng(7)
    for kind in ("normal, 1 %", "normal, 5 %", "log-normal, 5 %", "autocorrelated (0.5), 3 %"):
        spread = float(re.findall(r"(\d+) %", kind)[0]) / 100
        for steps in (8, 16, 50):
            far = changed = 0
            for _ in range(runs):
                noise = random.normal(0, spread, steps)
                if kind.startswith("auto"):
                    for at in range(1, steps):
                        noise[at] += 0.5 * noise[at - 1]
                times = 1e8 * (np.exp(noise) if kind.startswith("log") else 1 + noise)
                far += bool(outliers(times).size)
                found = change(times)
                if found is not None:
                    before, after = np.median(times[: found[0]]), np.median(times[found[0] :])
                    changed += bool(after >= (1 + CHANGE_LEAST) * before)
            yield kind, steps, far / runs, changed / runs


def job_false_alarms(seeds: Iterable[int], noise: float) -> dict[str, int]:
    """What clean jobs of four ranks are told to have, and how often."""
    counts: dict[str, int] = {}
    for seed in seeds:
        for name in names(find(clean_job(ranks=4, steps=10, seed=seed, noise=noise))):
            counts[name] = counts.get(name, 0) + 1
    return counts


def held_out(traces: Path) -> None:
    """Print how faults are found that are planted in traces that nothing was developed on."""
    bases = [("simulated", clean_job(steps=9, seed=50, noise=0.03)[0])]
    bases += [(name, next(iter(read_each(traces / name)))) for name in HELD_OUT]
    every: list[Trial] = []
    for base in bases:
        own = list(planted_trials([base], (200, 201), (1.5, 3.0)))
        print(base[0], total(own), total(own).precision, total(own).recall)
        every += own
    print("all", total(every), total(every).precision, total(every).recall)
    for pattern in patterns():
        counted = score(pattern.name, every)
        if counted.false or counted.missed:
            print(pattern.name, counted)


def main() -> None:
    """Print the table."""
    traces = Path(__file__).resolve().parents[4] / "shared" / "traces"
    if "held-out" in sys.argv[1:]:
        held_out(traces)
        return
    bases = simulated_bases() + (real_bases(traces) if traces.is_dir() else [])
    trials = [*planted_trials(bases, (0, 1), (1.5, 3.0)), *job_trials((0, 1, 2))]
    labelled = list(labelled_trials(traces)) if traces.is_dir() else []
    by_hand = [trial for _, trial in labelled]
    print("| pattern | planted | precision | recall | told / true cost | labels | prec. | recall |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for pattern in patterns():
        _print(pattern.name, trials, by_hand)
    for title, group in (("planted", trials), ("labelled", by_hand)):
        print(f"{title}: {total(group)} {total(group).precision} {total(group).recall}")
    for kind, steps, far, changed in false_alarms():
        print(f"| {kind} | {steps} | {100 * far:.1f} % | {100 * changed:.1f} % |")
    for noise in (0.01, 0.05, 0.2):
        print(f"40 clean jobs, kernels vary by {noise:.0%}: {job_false_alarms(range(40), noise)}")
    for path, trial in labelled:
        missed = trial.truth - trial.found
        false = trial.found - trial.truth - trial.allowed
        if missed or false:
            print(f"{path}: missed {sorted(missed)} false {sorted(false)}", file=sys.stderr)
    for trial in trials:
        missed, false = trial.truth - trial.found, trial.found - trial.truth - trial.allowed
        if missed or false:
            line = f"{sorted(trial.truth)}: missed {sorted(missed)} false {sorted(false)}"
            print(trial.where, line, file=sys.stderr)


def _print(name: str, trials: list[Trial], by_hand: list[Trial]) -> None:
    planted_score, hand = score(name, trials), score(name, by_hand)
    there, real = planted_score.true + planted_score.missed, hand.true + hand.missed
    ratios = sorted(
        told / cost
        for trial in trials
        if trial.truth == {name} and trial.cost is not None
        for cost, told in [trial.cost]
        if cost
    )
    ratio = f"{ratios[0]:.2f}–{ratios[-1]:.2f}" if ratios else "–"
    cells = [str(there), _rate(planted_score.precision), _rate(planted_score.recall), ratio]
    cells += [str(real), _rate(hand.precision), _rate(hand.recall)]
    print(f"| `{name}` | " + " | ".join(cells) + " |")


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


assert set(FAULTS) <= set(RANK_PATTERNS)
if __name__ == "__main__":
    main()
