"""Measure how well patterns are found, and keep the result; `page` puts it into the documentation.

    python -m validation.findings.run [--traces ../shared/traces] [--detail]

`--traces` holds the real traces that `labels.toml` names, which are public; everything else is
planted or simulated with fixed seeds, so that every figure can be made anew. `--detail` tells every
trial that went wrong.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from meshwright.observe.findings import list_patterns
from meshwright.timeline.readers.trace_folder import iter_timelines
from meshwright.timeline.timeline import Timeline
from validation.findings.alarms import KERNEL_NOISES, Alarms, job_alarms, step_alarms
from validation.findings.clean_jobs import clean_job
from validation.findings.scores import Score, Trial, score
from validation.findings.trials import job_trials, labelled_trials, planted_trials

RESULT = Path(__file__).parent / "result.json"
TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
SEEN_BASES = {
    "GPT, H100": "modded-nanogpt/ab-2025-10-31/current.json.gz",
    "ResNet, V100": "hta/ns_resolution_trace/rank-0.Apr_03_18_51_38.1102.pt.trace.json.gz",
    "recommendation model, A100": "hta/trace_diff/control/control.json.gz",
    "ResNet with DDP, MI300X": "tracelens/mi300/resnet_act_checkpoint.json.gz",
    "Qwen, H100": "tracelens/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "TimeSformer, MI300X": "tracelens/mi300/"
    "facebook_timesformer-base-finetuned-k400__1016002.json.gz",
    "ResNet with a loader, V100": "kineto-tb-plugin/resnet50_num_workers_4/"
    "worker0.1623212756351.pt.trace.json.gz",
    "diffusion, compiled, 8 GPUs": "tracelens/inference/xdit_sd_3.5/profile_trace_rank_0.json.gz",
    "recommendation model, V100": "hta/trace_diff/test/test.json.gz",
    "TimeSformer, H100": "tracelens/h100/facebook_timesformer-base-finetuned-k400__1016002.json.gz",
    "GPT, 8 x H100": "modded-nanogpt/8rank-h100-2025-12-11",
    "OWLv2, H100": "tracelens/h100/google_owlv2-large-patch14-ensemble__1016001.json.gz",
    "linear layers, RTX 2080 Ti": "param/linear_kineto.json.gz",
}
"""Detectors or planting were changed after faults had been planted in these."""
NEW_BASES = {
    "Qwen, MI300X": "tracelens/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "GPT, H100, two months later": "modded-nanogpt/h2dprefetch-2026-02-12",
    "ResNet with DDP, A100": "hta/nccl_parser_config/nccl_data.json.gz",
}
"""Neither detectors nor planting were changed after faults had been planted in these."""
NEW = "(new)"


class Row(NamedTuple):
    """One line of a table."""

    where: str
    score: Score


class Costs(NamedTuple):
    """What was told of planted costs, as a part of them: least and most."""

    least: float
    most: float


class PatternRow(NamedTuple):
    """One pattern over all planted faults and over all labels."""

    name: str
    planted: Score
    labelled: Score
    told: Costs | None


class Clean(NamedTuple):
    """What clean simulated jobs were told to have."""

    noise: str
    ranks: int
    jobs: int
    told: dict[str, int]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page shows."""

    labelled: tuple[Row, ...]
    planted: tuple[Row, ...]
    simulated: tuple[Row, ...]
    patterns: tuple[PatternRow, ...]
    steps: tuple[Alarms, ...]
    jobs: tuple[Clean, ...]


def measure(traces: Path, tell: Callable[[Trial], None]) -> Result:
    """Run every trial."""
    by_hand: list[Trial] = []
    faults: list[Trial] = []

    def rows(group: list[Trial], sets: Iterator[tuple[str, list[Trial]]]) -> tuple[Row, ...]:
        made = []
        for where, trials in sets:
            for trial in trials:
                tell(trial)
            group += trials
            made.append(Row(where, score(trials)))
        return tuple(made)

    return Result(
        labelled=rows(by_hand, _labelled(traces)),
        planted=rows(faults, _planted(traces)),
        simulated=rows(faults, _simulated()),
        patterns=tuple(
            PatternRow(one.name, score(faults, one.name), score(by_hand, one.name),
                       _costs(one.name, faults))
            for one in list_patterns()
        ),
        steps=tuple(step_alarms()),
        jobs=tuple(
            Clean(noise, ranks, 40, dict(job_alarms(range(40), ranks, noise)))
            for noise in KERNEL_NOISES for ranks in (4, 8)
        ),
    )  # fmt: skip


def _labelled(traces: Path) -> Iterator[tuple[str, list[Trial]]]:
    yield "labelled with the detectors known", list(labelled_trials(traces, "seen"))
    yield "labelled before the detectors saw them", list(labelled_trials(traces, "blind"))


def _planted(traces: Path) -> Iterator[tuple[str, list[Trial]]]:
    for name, path in SEEN_BASES.items():
        yield name, list(planted_trials(name, _first(traces / path), (200,)))
    for name, path in NEW_BASES.items():
        yield f"{name} {NEW}", list(planted_trials(name, _first(traces / path), (200, 201)))


def _simulated() -> Iterator[tuple[str, list[Trial]]]:
    for steps, seed in ((6, 1), (24, 2), (9, 50)):
        base = clean_job(steps=steps, seed=seed)[0]
        yield f"one rank, {steps} steps", list(planted_trials("simulated", base, (0, 1)))
    yield "four to six ranks", list(job_trials((0, 1, 2)))


def _first(path: Path) -> Timeline:
    return next(iter(iter_timelines(path)))


def _costs(name: str, trials: list[Trial]) -> Costs | None:
    ratios = [
        trial.cost[1] / trial.cost[0]
        for trial in trials
        if trial.truth == {name} and trial.cost is not None and trial.cost[0]
    ]
    return Costs(min(ratios), max(ratios)) if ratios else None


def read_result() -> Result:
    """The last result."""
    return msgspec.json.decode(RESULT.read_bytes(), type=Result)


def _tell(trial: Trial) -> None:
    if trial.missed or trial.false:
        sys.stderr.write(
            f"{trial.where}: {sorted(trial.truth)}: missed {sorted(trial.missed)}, "
            f"false {sorted(trial.false)}\n"
        )


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--detail", action="store_true")
    args = parser.parse_args()
    if not args.traces.is_dir():
        parser.error(f"{args.traces} is no folder: name the folder of public traces with --traces")
    found = measure(args.traces, _tell if args.detail else lambda _: None)
    text = msgspec.json.format(msgspec.json.encode(found), indent=1)
    RESULT.write_bytes(text + b"\n")
    for row in (*found.labelled, *found.planted, *found.simulated):
        sys.stdout.write(f"{row.where}: {row.score} {row.score.precision} {row.score.recall}\n")


if __name__ == "__main__":
    main()
